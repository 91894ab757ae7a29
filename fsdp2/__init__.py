"""Plain PyTorch FSDP2 training: start reading in `fsdp2/train.py`."""

"""Plain PyTorch FSDP2 training: start reading in `fsdp2/train.py`."""

import os

# The process that started this one, asked for before anything that takes time is imported: later it may have died.
STARTED_BY = os.getppid()

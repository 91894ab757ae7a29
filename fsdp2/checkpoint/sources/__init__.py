"""Tensors in other forms: what `python -m fsdp2.checkpoint` exports, imports, shows and compares."""

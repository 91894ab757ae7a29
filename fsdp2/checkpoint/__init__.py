"""Checkpoints: `state.py` knows objects and no files, `store.py` knows files and no models."""

from fsdp2 import beside

__path__.append(beside("checkpoint"))  # python -m fsdp2.checkpoint

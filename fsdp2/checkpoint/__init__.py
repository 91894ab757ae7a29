"""Checkpoints: `state.py` knows objects and no files, `store.py` knows files and no models."""

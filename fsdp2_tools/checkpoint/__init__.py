"""Checkpoints and files of weights: shown, compared, converted."""

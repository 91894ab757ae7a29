"""Checkpoints of FSDP1 to checkpoints of FSDP2, and back, each with a proof."""

"""From FSDP1 to FSDP2: options, source code, checkpoints, and a proof by running."""

"""A watch beside the training: ranks that hang or are slow, losses that jump, replicas that differ."""

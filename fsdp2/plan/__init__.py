"""What a run will need, found out by executing it on tensors that have no memory, without a GPU or other processes."""

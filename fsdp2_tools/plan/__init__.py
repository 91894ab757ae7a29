"""Plan a run by executing it on tensors that have no memory, without a GPU or other processes."""

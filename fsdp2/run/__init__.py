"""A run beside its training: the process, the run directory and who may write to it, signals, saving and resuming."""

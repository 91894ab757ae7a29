"""Checkpoints in the memory of nodes, from which a run goes on when a node is lost."""

"""The CUDA allocator's own history, as https://docs.pytorch.org/memory_viz shows it.

Torch documents these functions and has no public name for them:
https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
"""

from __future__ import annotations

import pickle

import torch

from fsdp2_extra.allocations.ledger import MAX_ENTRIES


def start() -> None:
    """Begin to record each allocation and its stack: Python's alone, since C++ symbols take minutes to look up."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_ENTRIES)


def take() -> bytes:
    """End the recording; return the content that `torch.cuda.memory._dump_snapshot` would write."""
    snapshot = pickle.dumps(torch.cuda.memory._snapshot())
    torch.cuda.memory._record_memory_history(enabled=None)
    return snapshot

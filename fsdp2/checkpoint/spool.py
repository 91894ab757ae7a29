"""Tensors that lie on disk and not in memory, for what wants to have all of them at once."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fsdp2.checkpoint.disk import disk_errors

K = TypeVar("K")

_ALIGNMENT = 64


def spool(tensors: Mapping[K, Tensor], read: Callable[[K], Tensor], folder: Path) -> dict[K, Tensor]:
    """Copy tensors, one at a time, into a temporary file of their size, and map it; the tensors there, by name.

    Args:
        tensors: name -> tensor with the shape and dtype: on `meta`, or sharded.
        read: name -> that tensor on the CPU, contiguous.
        folder: where the file is made. It has no name there, and is gone with the last tensor, or this process.
    """
    needed = sum(tensor.nbytes for tensor in tensors.values())
    with disk_errors(folder, needed), tempfile.TemporaryFile(dir=folder) as file:
        # All are written before any is mapped. What stays allocated between one read and the next would lie in
        # the memory that the former has given back, and the latter would not fit there any more.
        offsets = {}
        for name in tensors:
            offsets[name] = file.tell()
            file.write(raw_bytes(read(name)))
            file.write(bytes(-file.tell() % _ALIGNMENT))
        file.flush()
        # Private and not read-only, as torch wants it; nobody writes to it.
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if file.tell() else b""
    return {
        name: torch.frombuffer(memory, dtype=meta.dtype, count=meta.numel(), offset=offsets[name]).view(meta.shape)
        if meta.numel()
        else torch.empty(meta.shape, dtype=meta.dtype)
        for name, meta in tensors.items()
    }


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data

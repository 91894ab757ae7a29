"""Saving and restoring as collective operations: `state.py` and `store.py` put together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.checkpoint.state import AppState, read_shards, write_shards
from fsdp2.checkpoint.store import DamagedCheckpoint, Store, fingerprint, read_marker, verify


def save(store: Store, app: AppState, step: int, *, info: Mapping[str, Any], keep: int) -> Path:
    """Save one step on all ranks, commit it, and only then remove old ones. A collective call.

    Returns the checkpoint's directory. Each rank hashes the files that it wrote; rank 0 writes the marker
    when it has heard from all of them.
    """
    rank = dist.get_rank()
    if rank == 0:
        store.begin(step)
    dist.barrier()  # the directory has to exist
    directory = store.directory(step)
    write_shards(app, directory)
    mine = {path.name: fingerprint(path) for path in directory.glob(f"__{rank}_*.distcp")}
    if rank == 0:
        mine[".metadata"] = fingerprint(directory / ".metadata")
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    if rank == 0:
        files = {name: entry for part in parts for name, entry in part.items()}
        store.commit(step, files, {**info, "world_size": dist.get_world_size()})
        store.retain(keep)
    # No rank trains on before the checkpoint exists.
    dist.barrier()
    return directory


def save_full(api: Any, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Write the full model, and beside it the full optimizer, from rank 0. A collective call.

    Args:
        api: `full_dtensor` or `full_dcp`.
        path: of the model's file, full-model.pt; the optimizer's is full-optimizer.pt.

    Each is written under another name first: a file of that name is always a whole one.
    """
    for name, state in (
        (path, api.full_model_state(model)),
        (path.with_name("full-optimizer.pt"), api.full_optimizer_state(model, optimizer)),
    ):
        if dist.get_rank() == 0:
            name.parent.mkdir(parents=True, exist_ok=True)
            aside = name.with_suffix(".tmp")
            torch.save(state, aside)
            os.replace(aside, name)
    dist.barrier()


def verify_together(directory: Path) -> dict[str, Any]:
    """Check every file's hash, each rank its share; the marker. A collective call.

    Raises DamagedCheckpoint on every rank if any of them found damage.
    """
    marker = read_marker(directory)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    problem = None
    try:
        verify(directory, sorted(marker["files"])[rank::world_size])
    except DamagedCheckpoint as error:
        problem = str(error)
    problems: list[Any] = [None] * world_size
    dist.all_gather_object(problems, problem)
    if any(problems):
        raise DamagedCheckpoint("; ".join(filter(None, problems)))
    return marker


def restore(directory: Path, app: AppState) -> bool:
    """Verify a checkpoint and load it in place, whatever world size it is from. A collective call.

    Returns whether the ranks' random generators were restored (only at the same world size). Raises
    DamagedCheckpoint, or ValueError that lists what differs.
    """
    marker = verify_together(directory)
    return read_shards(app, directory, saved_world_size=marker["world_size"])

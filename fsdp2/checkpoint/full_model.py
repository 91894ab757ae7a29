"""full-model.pt: written by rank 0, with a marker beside it that vouches for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch
import torch.distributed as dist

from fsdp2.checkpoint.dcp_files import HashingStream
from fsdp2.checkpoint.disk import bytes_of, disk_errors
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.state import AppState
from fsdp2.checkpoint.store import MARKER, write_marker

T = TypeVar("T")

# Of weights, up to which a run writes its full model unasked: a billion fp32 parameters. With Adam's state three times
# that passes rank 0, at some 0.2 GB/s to a slow disk in a minute, while every other GPU waits. Above, the sharded
# checkpoint is written by all ranks, and one process without a GPU makes the file of it.
LARGEST_UNASKED = 4_000_000_000
SECONDS_BETWEEN_SIGNS = 10.0


def full_state_api(*, dcp_api: bool) -> Any:
    """Full state dicts by the DCP or the DTensor API: two modules with the same functions."""
    if dcp_api:
        from fsdp2.checkpoint import full_dcp

        return full_dcp
    from fsdp2.checkpoint import full_dtensor

    return full_dtensor


def save_full(api: Any, app: AppState, path: Path, step: int, info: Mapping[str, Any] | None = None) -> None:
    """Write the full model, and beside it the full optimizer, from rank 0, which may raise OSError. A collective call.

    Args:
        api: `full_dtensor` or `full_dcp`.
        path: of the model's file, full-model.pt; the optimizer's is full-optimizer.pt.
        info: what the marker says beside step and files.

    A file of that name is always a whole one: each is written under another name, synced and renamed. A marker
    beside them, written last, says of which step they are: after a kill in between they may be of two.
    """
    app.gather()
    folder, files = LocalFiles(path.parent), {}
    if dist.get_rank() == 0:
        with disk_errors(folder):
            folder.mkdir("")
            if folder.size(MARKER) is not None:
                folder.unlink(MARKER)
                folder.fsync("")
    for name, gather in (
        (path.name, lambda: api.full_model_state(app.model, folder.root)),
        ("full-optimizer.pt", lambda: api.full_optimizer_state(app.model, app.optimizer, folder.root)),
    ):
        state = gather()
        files[name] = while_rank_0(partial(_write_whole, folder, name, state))
        del state  # before the next is gathered
    if dist.get_rank() == 0:
        with disk_errors(folder):
            folder.fsync("")
            write_marker(folder, {**(info or {}), "step": step, "time": time.time(), "files": files})
    app.release()
    dist.barrier()


def while_rank_0(work: Callable[[], T]) -> T | None:
    """Call a function on rank 0 alone, while the others wait for as long as it takes; its result there. Collective.

    In a collective they would give up after the process group's timeout, and a large file takes longer. So rank 0
    works in a thread and sends them a sign of life every few seconds.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="rank 0 alone") as thread:
        future = thread.submit(work) if dist.get_rank() == 0 else None
        done = [False]
        while not done[0]:
            if future is not None:
                done = [bool(wait([future], SECONDS_BETWEEN_SIGNS).done)]
            dist.broadcast_object_list(done, src=0)
        return None if future is None else future.result()


def _write_whole(folder: LocalFiles, name: str, state: Any) -> dict[str, Any]:
    aside = f"{name}.tmp"
    with disk_errors(folder, bytes_of(state)):
        if folder.size(aside) is not None:
            folder.unlink(aside)  # of a run that died here
        with HashingStream(folder.create(aside)) as stream:
            torch.save(state, cast(IO[bytes], stream))
        folder.fsync(aside)
        folder.rename(aside, name)
    return stream.fingerprint()

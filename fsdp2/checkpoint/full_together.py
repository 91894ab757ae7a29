"""The full model written by all ranks side by side: safetensors in Hugging Face's layout.

Where each tensor begins in its file follows from names, shapes and dtypes, which every rank knows. So each writes the
rows that it holds to where they belong, nothing is gathered, and no rank needs memory for more than its shard.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint.disk import disk_errors
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.saver import SaveFailed
from fsdp2.checkpoint.sources.safetensors_files import layout, shards_of, write_index
from fsdp2.checkpoint.spool import raw_bytes
from fsdp2.checkpoint.state import AppState, plain_names
from fsdp2.checkpoint.store import INDEX, MARKER, fingerprint, write_marker
from fsdp2.checkpoint.together import raised_on_all

SHARD_BYTES = 4_000_000_000  # of tensors in one file


def save_together(
    app: AppState,
    folder: Path,
    step: int,
    slices_of: Callable[[Tensor], tuple[slice, ...]],
    tied: Sequence[Sequence[str]] = (),
    info: Mapping[str, Any] | None = None,
) -> None:
    """Write the model's weights as safetensors into a folder that all ranks see. A collective call.

    Args:
        slices_of: which range of each dimension of a whole tensor this rank holds.
        tied: names of one weight, which is written under the first.
        info: what the marker says beside step and files.

    A marker, written last, has the hash of each file. Raises SaveFailed on every rank if one can't write, and
    ValueError if a tensor is split on another dimension than its first.
    """
    app.gather()
    aliases = {name for _, *others in tied for name in others}
    targets = {name: tensor for name, tensor in plain_names(app.model).items() if name not in aliases}
    files, local = shards_of(targets, SHARD_BYTES), LocalFiles(folder)
    _together(lambda: _begin(local, files) if dist.get_rank() == 0 else None)
    _together(lambda: _write_rows(folder, files, slices_of))
    app.release()
    mine = list(files)[dist.get_rank() :: dist.get_world_size()]
    prints = _together(lambda: {file: fingerprint(local, f"{file}.tmp") for file in mine})
    _together(lambda: _commit(local, files, prints, {**(info or {}), "step": step}) if dist.get_rank() == 0 else None)


def _together(work: Callable[[], Any]) -> list[Any]:
    """Call a function on each rank and gather its results. Raises the error of any rank on each."""

    def failed(error: Exception) -> Exception:
        return (SaveFailed if isinstance(error, OSError) else ValueError)(str(error))  # an errno wouldn't travel

    results: list[Any] = [None] * dist.get_world_size()
    with raised_on_all(OSError, ValueError, as_=failed):
        mine = work()
    dist.all_gather_object(results, mine)
    return results


def _begin(folder: LocalFiles, files: dict[str, dict[str, Tensor]]) -> None:
    needed = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    with disk_errors(folder, needed):
        folder.mkdir("")
        if folder.size(MARKER) is not None:
            folder.unlink(MARKER)
            folder.fsync("")
        for file, tensors in files.items():
            if folder.size(f"{file}.tmp") is not None:
                folder.unlink(f"{file}.tmp")  # of a run that died here
            with folder.create(f"{file}.tmp") as target:
                target.write(layout(tensors)[0])


def _write_rows(
    folder: Path, files: dict[str, dict[str, Tensor]], slices_of: Callable[[Tensor], tuple[slice, ...]]
) -> None:
    for file, tensors in files.items():
        _, starts = layout(tensors)
        with disk_errors(folder, 0), open(folder / f"{file}.tmp", "r+b", buffering=0) as target:
            for name, start in starts.items():
                tensor = tensors[name]
                if not _is_mine(tensor):
                    continue
                rows, *others = slices_of(tensor) or (slice(0, 1),)
                if any(other != slice(0, size) for other, size in zip(others, tensor.shape[1:], strict=True)):
                    raise ValueError(f"{name}: is split on another dimension than its first; export the checkpoint")
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                content = raw_bytes(local.detach().cpu().contiguous())
                at = start + rows.start * tensor.shape[1:].numel() * tensor.itemsize
                while content:
                    written = os.pwrite(target.fileno(), content, at)
                    content, at = content[written:], at + written
            os.fsync(target.fileno())


def _is_mine(tensor: Tensor) -> bool:
    """Return whether this rank writes its part: of replicas the first does, and rank 0 what is whole on all."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(not place.is_replicate() or at == 0 for place, at in zip(tensor.placements, coordinate, strict=True))


def _commit(
    folder: LocalFiles, files: dict[str, dict[str, Tensor]], prints: list[dict[str, Any]], info: Mapping[str, Any]
) -> None:
    with disk_errors(folder):
        # Without its index a folder of several files isn't one that anything reads: after a kill between two renames
        # some would be of this step, and others of an earlier one.
        if folder.size(INDEX) is not None:
            folder.unlink(INDEX)
            folder.fsync("")
        for file in files:
            folder.rename(f"{file}.tmp", file)
        folder.fsync("")
        write_index(folder, files)
        folder.fsync("")
        known = {file: one for part in prints for file, one in part.items()}
        if len(files) > 1:
            known[INDEX] = fingerprint(folder, INDEX)
        write_marker(folder, {**info, "time": time.time(), "files": known})

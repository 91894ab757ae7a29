"""Read a full-model.pt and compare it with a model: the same for both ways of making one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.checkpoint.archive import load_archive
from fsdp2.checkpoint.files import Files, is_there
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.store import MARKER, read_marker, verify
from fsdp2.checkpoint.together import raised_on_all


def read_full(path: Path) -> dict[str, Tensor]:
    """The tensors of a full-model.pt, mapped from the file and read only when they are used; no code is run.

    Raises ValueError with the reason, in one line, if it is no such file.
    """
    try:
        state = load_archive(path)
    except OSError as error:
        raise ValueError(str(error)) from error
    except Refused as error:
        raise ValueError(f"it {error}") from None
    if not (isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())):
        raise ValueError("it holds no state dict")
    return state


def differences(full: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> a line, for each tensor that one of two state dicts lacks, or whose shape or kind of numbers differs."""
    lines = dict.fromkeys(full.keys() - targets.keys(), "only in the file")
    lines |= dict.fromkeys(targets.keys() - full.keys(), "only in the model")
    for name in full.keys() & targets.keys():
        there, here = full[name], targets[name]
        if there.shape != here.shape:
            lines[name] = f"{tuple(there.shape)} in the file, {tuple(here.shape)} in the model"
        elif there.dtype != here.dtype and not (is_cast(there.dtype) and is_cast(here.dtype)):
            lines[name] = f"{there.dtype} in the file, {here.dtype} in the model"
    return {name: f"{name}: {lines[name]}" for name in sorted(lines)}


def is_cast(dtype: torch.dtype) -> bool:
    """Return whether a cast to and from it means the same weights.

    Integers would be rounded. As weights, they and floating point numbers of 8 bits are quantized, which makes no sense
    without their scales.
    """
    return dtype.is_floating_point and dtype.itemsize > 1


def read_same(path: Path, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file that fit the targets, on rank 0, and {} elsewhere. A collective call.

    A floating dtype may be another one than its target's. Raises ValueError on every rank if the file can't be read or
    doesn't fit.
    """
    full: dict[str, Tensor] = {}
    with raised_on_all(ValueError, as_=lambda error: error):
        if dist.get_rank() == 0:
            try:
                full = read_full(path)
            except (OSError, ValueError) as error:
                raise ValueError(f"{path} can't be read: {error}") from None
            if found := differences(full, targets):
                raise ValueError(f"{path} is of another model: {'; '.join(list(found.values())[:20])}")
    return full


def vouched_step(folder: Files, file: str | None) -> int | None:
    """The step that a folder's marker gives for a file, or for all that it lists, after their hashes were compared.

    None if there is no marker, or it doesn't list the file: it may be of any step, and may be damaged. Raises
    DamagedCheckpoint if the file isn't as it was saved, or the marker can't be read.
    """
    if not is_there(folder, MARKER):
        return None
    marker = read_marker(folder)
    if file is not None and file not in marker["files"]:
        return None
    verify(folder, None if file is None else [file])
    return int(marker["step"])


def verdict(step: int | None) -> str:
    """`vouched_step`'s answer in words."""
    return "unverified, since no marker beside it lists it" if step is None else f"verified, step {step}"

"""Restoring as a collective operation: a checkpoint into the objects of a run, which must match it exactly."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from fsdp2.checkpoint.files import Files
from fsdp2.checkpoint.planner import StrictLoadPlanner, misfit
from fsdp2.checkpoint.refusal import one_line
from fsdp2.checkpoint.safe_reader import SafeReader
from fsdp2.checkpoint.state import AppState, Progress, RandomState, WeightsOnly, seed_everything
from fsdp2.checkpoint.store import (
    HASH,
    MARKER,
    METADATA,
    ChangedFile,
    DamagedCheckpoint,
    Store,
    read_marker,
    require_metadata,
    verify,
)
from fsdp2.checkpoint.together import raised_on_all

# Entries that checkpoints of earlier versions, and optimizers of an older torch, lack: they stay as they are here.
_NEWER = re.compile(r"app\.batches\.content$")
_SETTINGS = re.compile(r"app\.optim\.param_groups\.\d+\.(?!params$|lr$).+")
_EVERYTHING = ("",)  # each name begins so
# Errors of code that is given other values than it has saved.
_BY_VALUES = (ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)


def open_together(
    checkpoint: Files, *, hashes: bool = True, sharers: tuple[int, int] | None = None
) -> tuple[dict[str, Any], SafeReader]:
    """The marker of a checkpoint, and a reader that compares files with it, each on one rank. A collective call.

    `sharers`: this rank's number among those that read the same files, and how many they are; None is all ranks.
    Sizes and `.metadata` are compared here. The hash of any other file is compared while the reader reads it, so what
    is loaded must not be used before all ranks have loaded. Without `hashes` its size is trusted.

    Raises DamagedCheckpoint on every rank if any of them found damage.
    """
    with raised_on_all(DamagedCheckpoint, FileNotFoundError, as_=lambda error: DamagedCheckpoint(str(error))):
        marker = read_marker(checkpoint)
        require_metadata(checkpoint, marker)
        mine = _my_files(marker["files"], *(sharers or (dist.get_rank(), dist.get_world_size())))
        verify(checkpoint, mine, hashes=False)
        compared = {METADATA, *(mine if hashes else ())}
        reader = SafeReader(checkpoint, marker["files"], {name: marker["files"][name][HASH] for name in compared})
        reader.read_metadata()
    return marker, reader


def _my_files(names: Iterable[str], rank: int, world_size: int) -> list[str]:
    """List the files whose content this rank compares: the shards that it reads most of, by who wrote them."""
    mine = []
    for number, name in enumerate(sorted(names)):
        writer = re.match(r"__(\d{1,9})_", name)
        if (int(writer[1]) if writer else number) % world_size == rank:
            mine.append(name)
    return mine


def restore(checkpoint: Files, app: AppState, *, hashes: bool = True, sharers: tuple[int, int] | None = None) -> bool:
    """Load a checkpoint in place, whatever world size it is from, and verify it meanwhile. A collective call.

    `hashes` False trusts the sizes of its files, for `sharers` see `open_together`. If this raises, discard the model
    and the optimizer.

    Returns whether the ranks' random generators were restored. A checkpoint of another world size, or of a run without
    the GPU that there is now, has none for them, and the caller must seed them. Raises DamagedCheckpoint, or ValueError
    that lists what differs.
    """
    marker, reader = open_together(checkpoint, hashes=hashes, sharers=sharers)
    if marker.get("imported"):
        _restore_imported(checkpoint, app, marker, reader)
        return False
    saved = reader.read_metadata().state_dict_metadata
    generators = app.parts["rng"].state_dict() if "rng" in app.parts else {}
    ours = [f"app.rng.{rank}.{name}" for rank, state in generators.items() for name in state]
    same_ranks = marker["world_size"] == dist.get_world_size()
    restorable = bool(ours) and same_ranks and all(name in saved for name in ours)
    if not restorable:
        app = app.with_parts({k: v for k, v in app.parts.items() if k != "rng"})
    _load(app, reader, ignore=("app.rng.",), keep=_NEWER)
    if isinstance(progress := app.parts.get("progress"), Progress):
        require_step(checkpoint, progress.step, marker)
    return restorable


def _restore_imported(checkpoint: Files, app: AppState, marker: Mapping[str, Any], reader: SafeReader) -> None:
    """Load another program's checkpoint: the model, and the optimizer and the step if it has them."""
    saved = reader.read_metadata().state_dict_metadata
    if not any(name.startswith("app.optim.") for name in saved):
        _load(WeightsOnly(app.model, app.source), reader)
        return
    known = {"progress": app.parts["progress"]} if "app.progress.step" in saved else {}
    _load(app.with_parts(known), reader, keep=_SETTINGS)
    if isinstance(progress := known.get("progress"), Progress):
        require_step(checkpoint, progress.step, marker)


def restore_newest(store: Store, app: AppState, seed: int | None = None) -> int:
    """Load the newest committed checkpoint of a store in place; its step, or 0 if there is none. A collective call.

    From here on `app` holds each rank's random generators, as the part `rng`, for dropout and the like. Where a
    checkpoint has none for them, or there is no checkpoint, they are made from `seed` (unset = the one of
    `torch.manual_seed`), the rank and the step: ranks that drew alike before no longer do.

    Raises as `restore` does.
    """
    rank = dist.get_rank()
    if "rng" not in app.parts:
        on_gpu = (one.device for one in app.model.parameters() if one.device.type == "cuda")
        here = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
        app.parts = {**app.parts, "rng": RandomState(rank, next(on_gpu, here))}
    newest = [max(store.committed(), default=0) if rank == 0 else 0]
    dist.broadcast_object_list(newest, src=0)  # rank 0's answer: others may see a shared folder later
    if not newest[0] or not restore(store.checkpoint(newest[0]), app):
        mine = app.parts["rng"]
        seed = torch.initial_seed() if seed is None else seed
        seed_everything(seed, mine.unlike if isinstance(mine, RandomState) else rank, newest[0])
    return newest[0]


def require_step(checkpoint: Files, step: Any, marker: Mapping[str, Any]) -> None:
    """Raise DamagedCheckpoint if the files of a checkpoint say another step than its marker."""
    if step != marker["step"]:
        raise DamagedCheckpoint(f"{checkpoint}: {MARKER} is of step {marker['step']}, and its files of another")


def read_weights(wanted: WeightsOnly, checkpoint: Files) -> None:
    """Load the weights alone into a sharded model, verified; no rank sees a full copy. A collective call.

    Strict as far as weights go: raises ValueError that lists what differs, or DamagedCheckpoint.
    """
    _, reader = open_together(checkpoint)
    ours = tuple(f"app.{part}." for part in ("model", *wanted.parts))
    others = tuple(name for name in reader.read_metadata().state_dict_metadata if not name.startswith(ours))
    _load(wanted, reader, ignore=others)


def read_fitting_weights(model: nn.Module, checkpoint: Files, *, hashes: bool = True) -> tuple[int, list[str]]:
    """Load those weights that have the same name, shape and dtype here, and leave the rest. A collective call.

    Returns how many tensors were loaded, and a line for each tensor of either side, and each other part of the
    checkpoint, that was left out. Raises DamagedCheckpoint, or ValueError for what can't be loaded.
    """
    _, reader = open_together(checkpoint, hashes=hashes)
    saved = reader.read_metadata().state_dict_metadata
    theirs = {name.removeprefix("app.model."): entry for name, entry in saved.items() if name.startswith("app.model.")}
    targets: dict[str, Any] = get_model_state_dict(model)
    problems = {name: misfit(theirs[name], target) for name, target in targets.items() if name in theirs}
    fitting = {name: targets[name] for name, problem in problems.items() if problem is None}
    _load({"model": fitting}, reader, ignore=_EVERYTHING)
    # For strategies whose state dict is a copy of the parameters.
    set_model_state_dict(model, targets, options=StateDictOptions(strict=True))
    left_out = [f"{name}: {problem}" for name, problem in sorted(problems.items()) if problem]
    left_out += [f"{name}: not in the checkpoint" for name in sorted(targets.keys() - theirs.keys())]
    left_out += [f"{name}: not in this model" for name in sorted(theirs.keys() - targets.keys())]
    parts = Counter(name.removeprefix("app.").split(".")[0] for name in saved if not name.startswith("app.model."))
    left_out += [f"{part}: not loaded ({count} entries)" for part, count in sorted(parts.items())]
    return len(fitting), left_out


def _load(state: Any, reader: SafeReader, ignore: tuple[str, ...] = (), keep: re.Pattern[str] | None = None) -> None:
    try:
        # What the state is of may refuse a value when other ranks have taken theirs.
        with raised_on_all(*_BY_VALUES, as_=_not_taken):
            dcp.load({"app": state}, storage_reader=reader, planner=StrictLoadPlanner(ignore, keep))
    except CheckpointException as error:
        # It is no Exception, and its text is the tracebacks of all ranks; the cause says what is wrong.
        causes = [cause for cause, _ in error.failures.values()]
        for kind in (ChangedFile, DamagedCheckpoint):
            if damage := sorted({str(one) for one in causes if isinstance(one, kind)}):
                raise DamagedCheckpoint("; ".join(damage)) from None
        cause = causes[0]
        if isinstance(cause, _BY_VALUES) and not isinstance(cause, ValueError):
            raise DamagedCheckpoint(f"{reader.files}: can't be loaded ({one_line(cause)})") from cause
        raise cause from None


def _not_taken(error: Exception) -> ValueError:
    return ValueError(error if isinstance(error, ValueError) else f"a value can't be taken ({one_line(error)})")

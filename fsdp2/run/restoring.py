"""The state of a run restored from the checkpoint that it resumes from, also from an imported one."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp2.checkpoint.files import Files
from fsdp2.checkpoint.places import open_files
from fsdp2.checkpoint.restore import read_fitting_weights, restore
from fsdp2.checkpoint.state import HOW, AppState
from fsdp2.checkpoint.store import DamagedCheckpoint, read_marker
from fsdp2.options.errors import ConfigError
from fsdp2.run.job import Job
from fsdp2.run.process.runtime import world
from fsdp2.run.resuming import damaged

if TYPE_CHECKING:
    from fsdp2.parallel.ema import Ema


def restore_run(job: Job, app: AppState, average: Ema | None, *, hashes: bool) -> dict[str, Any]:
    """Load the checkpoint that the job resumes from; `start.resume` says how. A collective call."""
    origin, partly = job.origin, dict[str, Any]()
    files, began, restored = open_files(str(origin.checkpoint)), time.perf_counter(), True
    try:
        if origin.partial:
            partly["loaded"], partly["left_out"] = read_fitting_weights(app.model, files, hashes=hashes)
        else:
            restored = _restore_all(job, app, average, files, hashes=hashes)
    except DamagedCheckpoint as error:
        if origin.in_memory:
            fix = "remove it there, and the run goes on from the run directory's newest"
            raise ConfigError(f"--memory-checkpoint: the checkpoint is damaged: {error}; {fix}") from None
        raise damaged(error) from None
    except ValueError as error:
        raise ConfigError(f"--resume: {files} can't be restored: {error}") from None
    if partly and not partly["loaded"]:
        raise ConfigError(
            f"--resume-partial: no tensor of {origin.checkpoint} fits this model; "
            "`python -m fsdp2.checkpoint show` lists its names and shapes"
        )
    return {"random_state_restored": restored, "restore_seconds": time.perf_counter() - began, **partly}


def _restore_all(job: Job, app: AppState, average: Ema | None, files: Files, *, hashes: bool) -> bool:
    """Restore everything. An import's optimizer settings win over the flags. Returns and raises as `restore` does."""
    here, ours, scaler = world(), settings_of(app.optimizer), app.parts["scaler"].state_dict()
    sharers = (here.local_rank, here.local_world_size) if job.origin.in_memory else None
    restored = restore(files, app, hashes=hashes, sharers=sharers)
    theirs, marker = settings_of(app.optimizer), read_marker(files)
    imported = marker.get("imported")
    if imported and average is not None:
        average.load_state_dict(average.weights)  # an import holds none: it begins with the weights that came
    job.optimizer = {name: theirs[name] for name in ours if theirs[name] != ours[name]}
    if changed := ", ".join(f"{name} {value}" for name, value in job.optimizer.items()):
        if not imported and job.optimizer != marker.get("optimizer"):
            raise DamagedCheckpoint(f"its optimizer has other settings than its flags: {changed}")
        job.add_note(f"--resume: the import's settings of the optimizer count, not the flags': {changed}")
    require_possible(app.optimizer, ours, theirs)
    if scaler and (wrong := _unlike(scaler, app.parts["scaler"].state_dict())):
        raise DamagedCheckpoint(f"its gradient scaler has {wrong}, which none of a run has")
    return restored


def _unlike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Name the values of a gradient scaler's state that no training leaves; "" if there are none."""
    good = {**ours, "scale": 0 < theirs["scale"] < float("inf") and theirs["scale"]}
    good["_growth_tracker"] = theirs["_growth_tracker"] % ours["growth_interval"]  # counted from 0 again when reached
    return ", ".join(f"{name} {theirs[name]}" for name in good if theirs[name] != good[name])


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Name -> setting of the optimizer, without the rate, which is the schedule's, and without how it computes."""
    found, several = dict[str, Any](), len(optimizer.param_groups) > 1
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name not in ("params", "lr", "initial_lr", *HOW):
                key = f"{name} of group {number}" if several else name
                found[key] = list(value) if isinstance(value, tuple) else value
    return found


def require_possible(optimizer: torch.optim.Optimizer, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ValueError for settings that torch refuses where it makes an optimizer, or that need other state."""
    makes = type(optimizer)
    known = inspect.signature(makes).parameters.keys() - {"params", *HOW}
    try:
        for group in optimizer.param_groups if makes.__module__.startswith("torch.optim.") else ():
            float(sum(value for value in group.values() if isinstance(value, int)))  # overflows here, not in a step
            makes([torch.zeros(1)], **{name: group[name] for name in known & group.keys()})
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"an optimizer with its settings can't be made ({error})") from None
    counts = [state["step"].cpu() for state in optimizer.state.values() if isinstance(state.get("step"), Tensor)]
    if counts and not torch.stack(counts).min() >= 0:  # NaN isn't either
        raise ValueError(f"its optimizer has counted {torch.stack(counts).min():g} steps of a weight")
    if wrong := [name for name in ours if name.startswith("amsgrad") and theirs[name] != ours[name]]:
        raise ValueError(f"its optimizer has {wrong[0]} {theirs[wrong[0]]}, and no state for that")

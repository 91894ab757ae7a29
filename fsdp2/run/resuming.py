"""The checkpoint that a run goes on from: agreed on by all ranks, and loaded into the parts of its state."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from fsdp2.checkpoint.places import open_files
from fsdp2.checkpoint.state import AppState
from fsdp2.checkpoint.store import DamagedCheckpoint, read_marker
from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.run.directory.job import Job
from fsdp2.run.preflight import damaged
from fsdp2.run.process import runtime

if TYPE_CHECKING:
    from fsdp2.run.elastic.node_memory import NodeMemory


def agree(config: Config, job: Job, world: runtime.World, device: torch.device) -> NodeMemory | None:
    """Take over what rank 0 has found out. With `--memory-checkpoint`, find what is in the nodes' memories, and let
    `job` go on from it if it is newer. A collective call.

    Raises ConfigError on every rank, as `Job.agree` and `NodeMemory` do.
    """
    job.agree()
    if config.memory_checkpoint is None:
        return None
    from fsdp2.run.elastic.node_memory import NodeMemory

    return NodeMemory(config, config.memory_checkpoint, job, world, device)


def resume(job: Job, app: AppState, *, hashes: bool = True) -> dict[str, Any]:
    """Load what the job starts from into `app`, its files' hashes compared or their sizes alone. A collective call.

    Returns `random_state_restored`, `restore_seconds`, and with --resume-partial `loaded` and `left_out`. Raises
    ConfigError, on all ranks, if the checkpoint is damaged or doesn't fit.
    """
    checkpoint, partial, in_memory, *_ = job.origin
    if checkpoint is None:
        return {"random_state_restored": True}
    from fsdp2.checkpoint.restore import read_fitting_weights, restore

    files = open_files(checkpoint)
    began = time.perf_counter()
    try:
        if not partial:
            world = runtime.world()
            sharers = (world.local_rank, world.local_world_size) if in_memory else None
            ours = _settings(app)
            restored = restore(files, app, hashes=hashes, sharers=sharers)
            theirs = _settings(app)
            if changed := ", ".join(f"{name} {theirs[name]}" for name in ours if theirs[name] != ours[name]):
                if not read_marker(files).get("imported"):
                    raise DamagedCheckpoint(f"its optimizer has other settings than its flags: {changed}")
                job.add_note(f"--resume: the import's settings of the optimizer count, not the flags': {changed}")
            return {"random_state_restored": restored, "restore_seconds": time.perf_counter() - began}
        loaded, left_out = read_fitting_weights(app.model, files, hashes=hashes)
    except DamagedCheckpoint as error:
        if in_memory:
            fix = "remove it there, and the run goes on from the run directory's newest"
            raise ConfigError(f"--memory-checkpoint: the checkpoint is damaged: {error}; {fix}") from None
        raise damaged(error) from None
    except ValueError as error:
        raise ConfigError(f"--resume: {files} can't be restored: {error}") from None
    if not loaded:
        raise ConfigError(
            f"--resume-partial: no tensor of {checkpoint} fits this model; `python -m fsdp2.checkpoint show` lists "
            "its names and shapes"
        )
    took = time.perf_counter() - began
    return {"random_state_restored": True, "restore_seconds": took, "loaded": loaded, "left_out": left_out}


def _settings(app: AppState) -> dict[str, Any]:
    """How the optimizer updates, but for the rate, which is the schedule's, and for how it computes."""
    beside = ("params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable")
    groups = enumerate(app.optimizer.param_groups)
    found = {(name, number): group[name] for number, group in groups for name in group if name not in beside}
    several = len(app.optimizer.param_groups) > 1
    return {f"{name} of group {number}" if several else name: _plain(one) for (name, number), one in found.items()}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value

"""The start of a run: the checkpoint that ranks agree on and load, and what is written before the first step."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from fsdp2.checkpoint import meaning
from fsdp2.checkpoint.places import open_files
from fsdp2.checkpoint.state import HOW, AppState, Part, Progress, RandomState, SchedulerState
from fsdp2.checkpoint.store import DamagedCheckpoint, read_marker
from fsdp2.config import Config
from fsdp2.data.loader import Batches
from fsdp2.data.splits import Dataset
from fsdp2.options.errors import ConfigError
from fsdp2.parallel.engine import Engine
from fsdp2.run.directory.job import Job
from fsdp2.run.directory.marker import kept_files
from fsdp2.run.directory.rundir import LINEAGE, write_config
from fsdp2.run.preflight import damaged
from fsdp2.run.process.runtime import World, world

if TYPE_CHECKING:
    from fsdp2.parallel.ema import Ema
    from fsdp2_extra.elastic.node_memory import NodeMemory


def agree(config: Config, job: Job, world: World, device: torch.device) -> NodeMemory | None:
    """Take over what rank 0 has found out. With `--memory-checkpoint`, find what is in the nodes' memories, and let
    `job` go on from it if it is newer. A collective call.

    Raises ConfigError on every rank, as `Job.agree` and `NodeMemory` do.
    """
    job.agree()
    if config.memory_checkpoint is None:
        return None
    from fsdp2_extra.elastic.node_memory import NodeMemory

    memory = NodeMemory(config, config.memory_checkpoint, job.run, world, device, job.hold)
    if config.resume == "auto" and (found := memory.find(config, job.origin)) is not None:
        job.go_on_from(*found)
    return memory


def resume(job: Job, app: AppState, average: Ema | None, *, hashes: bool = True) -> dict[str, Any]:
    """Load what the job starts from into `app` and --ema's average; compares hashes, or sizes alone. A collective call.

    Returns `random_state_restored`, `restore_seconds`, and with --resume-partial `loaded` and `left_out`. Raises
    ConfigError, on all ranks, if the checkpoint is damaged or doesn't fit.
    """
    if (origin := job.origin).checkpoint is None:
        return {"random_state_restored": True}
    from fsdp2.checkpoint.restore import read_fitting_weights, restore

    files, began = open_files(origin.checkpoint), time.perf_counter()
    try:
        if not origin.partial:
            here, ours = world(), _settings(app)
            sharers = (here.local_rank, here.local_world_size) if origin.in_memory else None
            restored = restore(files, app, hashes=hashes, sharers=sharers)
            theirs, marker = _settings(app), read_marker(files)
            imported = marker.get("imported")
            if imported and average is not None:
                average.load_state_dict(average.weights)  # an import holds none: it begins with the weights that came
            job.optimizer = {name: theirs[name] for name in ours if theirs[name] != ours[name]}
            if changed := ", ".join(f"{name} {value}" for name, value in job.optimizer.items()):
                if not imported and job.optimizer != marker.get("optimizer"):
                    raise DamagedCheckpoint(f"its optimizer has other settings than its flags: {changed}")
                job.add_note(f"--resume: the import's settings of the optimizer count, not the flags': {changed}")
            _require_possible(app.optimizer, ours, theirs)
            return {"random_state_restored": restored, "restore_seconds": time.perf_counter() - began}
        loaded, left_out = read_fitting_weights(app.model, files, hashes=hashes)
    except DamagedCheckpoint as error:
        if origin.in_memory:
            fix = "remove it there, and the run goes on from the run directory's newest"
            raise ConfigError(f"--memory-checkpoint: the checkpoint is damaged: {error}; {fix}") from None
        raise damaged(error) from None
    except ValueError as error:
        raise ConfigError(f"--resume: {files} can't be restored: {error}") from None
    if not loaded:
        raise ConfigError(
            f"--resume-partial: no tensor of {origin.checkpoint} fits this model; "
            "`python -m fsdp2.checkpoint show` lists its names and shapes"
        )
    facts = {"random_state_restored": True, "restore_seconds": time.perf_counter() - began}
    return {**facts, "loaded": loaded, "left_out": left_out}


def _settings(app: AppState) -> dict[str, Any]:
    """How the optimizer updates, but for the rate, which is the schedule's, and for how it computes."""
    beside = ("params", "lr", "initial_lr", *HOW)
    groups = enumerate(app.optimizer.param_groups)
    found = {(name, number): group[name] for number, group in groups for name in group if name not in beside}
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
    several = len(app.optimizer.param_groups) > 1
    return {f"{name} of group {number}" if several else name: value for (name, number), value in found.items()}


def _require_possible(optimizer: torch.optim.Optimizer, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ValueError for settings that torch refuses where it makes an optimizer, or that need other state."""
    makes = type(optimizer)
    known = inspect.signature(makes).parameters.keys() - {"params", *HOW}
    try:
        for group in optimizer.param_groups if makes.__module__.startswith("torch.optim.") else ():
            float(sum(value for value in group.values() if isinstance(value, int)))  # else it fails in the first step
            makes([torch.zeros(1)], **{name: group[name] for name in known & group.keys()})
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"an optimizer with its settings can't be made ({error})") from None
    if wrong := [name for name in ours if name.startswith("amsgrad") and theirs[name] != ours[name]]:
        raise ValueError(f"its optimizer has {wrong[0]} {theirs[wrong[0]]}, and no state for that")


def try_out(config: Config, engine: Engine, dataset: Dataset, device: torch.device) -> None:
    """Raise ConfigError on every rank if a language model doesn't do what was asked, which only a forward tells.

    A collective call.
    """
    if config.spec.kind == "language":
        from fsdp2.run import trial

        trial.try_out(config, engine, dataset, device)


def state_of_run(
    engine: Engine,
    scheduler: LRScheduler,
    batches: Batches,
    progress: Progress,
    world: World,
    device: torch.device,
    also_saved: Mapping[str, Part] | None,
) -> AppState:
    """All that a checkpoint holds and a resume restores. Raises ValueError for a name that is taken."""
    parts: dict[str, Part] = {
        "scheduler": SchedulerState(scheduler),
        "scaler": engine.scaler,
        "batches": batches,
        "progress": progress,
        "rng": RandomState(world.rank, device),
        **engine.parts,
    }
    if taken := sorted({"model", "optim", *parts} & set(also_saved or {})):
        raise ValueError(f"also_saved: {', '.join(taken)} is a part of each checkpoint already; choose another name")
    state, parts = engine.state, {**parts, **(also_saved or {})}
    return AppState(state["model"], state["optimizer"], parts, engine, engine.elsewhere)


def write_start(
    config: Config,
    job: Job,
    world: World,
    app: AppState,
    memory: NodeMemory | None,
    files: Mapping[str, bytes],
    *,
    finished: bool,
) -> None:
    """Write what a run directory holds before the first step, and put aside what this run replaces, in memory too.

    Args:
        files: further ones by name, the engine's own.
        finished: there is nothing to train, so what an earlier run left is still true.
    """
    run = job.run
    if memory is not None:
        memory.begin(app)
    if world.rank != 0:
        return
    if memory is None and run.files.size(LINEAGE) is not None:
        run.files.unlink(LINEAGE)
    job.set_aside_newer()
    if not finished:
        run.outdate_full_model()
    if not (finished and run.config.exists()):  # a finished run keeps what it was trained with
        write_config(run, config, world.world_size)
        for name, content in files.items():
            run.files.write(name, content)
        if model := config.spec.files(config.model_size):
            run.files.mkdir("model")
        for name, content in model.items():
            run.files.write(f"model/{name}", content)
        meaning.replace(run.files.at(meaning.TOKENIZER), kept_files(config).get(meaning.TOKENIZER, {}))

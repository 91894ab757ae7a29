"""The start of a run: the checkpoint that ranks agree on and load, and what is written before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from fsdp2.checkpoint import meaning
from fsdp2.checkpoint.state import AppState, Part, Progress, RandomState, SchedulerState
from fsdp2.config import Config
from fsdp2.data.loader import Batches
from fsdp2.data.splits import Dataset
from fsdp2.parallel.engine import Engine
from fsdp2.run.directory.marker import kept_files
from fsdp2.run.directory.rundir import LINEAGE, write_config
from fsdp2.run.job import Job
from fsdp2.run.process.runtime import World

if TYPE_CHECKING:
    from fsdp2.parallel.ema import Ema
    from fsdp2_extra.elastic.node_memory import NodeFolder, NodeMemory


def agree(config: Config, job: Job, world: World) -> NodeFolder | None:
    """Take over what rank 0 has found out. With `--memory-checkpoint`, find what is in the nodes' memories, and let
    `job` go on from it if it is newer. A collective call.

    Raises ConfigError on every rank, as `Job.agree` and `NodeFolder` do.
    """
    job.agree()
    if config.memory_checkpoint is None:
        return None
    from fsdp2_extra.elastic.node_memory import NodeFolder

    folder = NodeFolder(config, job.run, world, job.hold.also)
    if config.resume == "auto" and (found := folder.find(config, job.origin)) is not None:
        job.go_on_from(*found)
    return folder


def resume(job: Job, app: AppState, average: Ema | None, *, hashes: bool = True) -> dict[str, Any]:
    """Load what the job starts from into `app` and --ema's average; compares hashes, or sizes alone. A collective call.

    Returns `random_state_restored`, `restore_seconds`, and with --resume-partial `loaded` and `left_out`. Raises
    ConfigError, on all ranks, if the checkpoint is damaged or doesn't fit.
    """
    if job.origin.checkpoint is None:
        return {"random_state_restored": True}
    from fsdp2.run.resuming import take_up

    return take_up(job, app, average, hashes=hashes)


def try_out(config: Config, engine: Engine, dataset: Dataset, device: torch.device) -> None:
    """Raise ConfigError on every rank if a language model doesn't do what was asked, which only a forward tells.

    A collective call.
    """
    if config.spec.kind == "language":
        from fsdp2.run import trial

        trial.try_out(config, engine, dataset, device)


def state_of_run(
    config: Config,
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
        "rng": RandomState(world.rank, device, config.tp),
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
    device: torch.device,
    folder: NodeFolder | None,
    files: Mapping[str, bytes],
    *,
    finished: bool,
) -> NodeMemory | None:
    """Write what a run directory holds before the first step, and put aside what this run replaces, in memory too.

    Returns what keeps further checkpoints in memory, with `--memory-checkpoint`.

    Args:
        files: further ones by name, the engine's own.
        finished: there is nothing to train, so what an earlier run left is still true.
    """
    run = job.run
    memory = None
    if folder is not None:
        from fsdp2_extra.elastic.node_memory import NodeMemory

        memory = NodeMemory(config, folder, app, device)
    if world.rank != 0:
        return memory
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
    return memory

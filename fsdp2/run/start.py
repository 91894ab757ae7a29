"""What a run begins with: its data, the parts of its state, and what is written before the first step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim.lr_scheduler import StepLR

from fsdp2 import data
from fsdp2.checkpoint.state import AppState, Part, Progress, RandomState, SchedulerState
from fsdp2.config import Config
from fsdp2.data import Dataset
from fsdp2.data.loader import Batches
from fsdp2.models import ModelSpec
from fsdp2.options.errors import ConfigError
from fsdp2.parallel.engine import Engine
from fsdp2.run.job import Job
from fsdp2.run.rundir import RunDir, write_config
from fsdp2.run.runtime import World, first_on_node


def load_data(config: Config, spec: ModelSpec, world: World) -> Dataset:
    """The dataset, whole on every rank; a download happens once on each node, while its other ranks wait."""
    with first_on_node(world):
        try:
            return data.load(
                config.dataset,
                root=config.data_root,
                seq_len=config.seq_len,
                vocab_size=spec.vocab_size(config.model_size),
            )
        except data.DownloadFailed as error:
            raise ConfigError(str(error)) from None


def training_batches(config: Config, dataset: Dataset, world: World, device: torch.device) -> Batches:
    """This rank's part of each global batch."""
    return Batches(
        dataset.train,
        global_batch=config.global_batch(world.world_size),
        accumulation=config.grad_accumulation,
        seed=config.seed,
        rank=world.rank,
        world_size=world.world_size,
        device=device,
        workers=config.loader_workers,
    )


def state_of_run(
    engine: Engine,
    scheduler: StepLR,
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
    }
    taken = sorted({"model", "optim", *parts} & set(also_saved or {}))
    if taken:
        raise ValueError(f"also_saved: {', '.join(taken)} is a part of each checkpoint already; choose another name")
    return AppState(engine.state["model"], engine.state["optimizer"], {**parts, **(also_saved or {})}, engine)


def write_start(
    config: Config, job: Job, run: RunDir, world: World, files: Mapping[str, bytes], *, finished: bool
) -> None:
    """On rank 0, write what a run directory holds before the first step, and put aside what this run replaces.

    Args:
        files: further ones by name, the engine's own.
        finished: there is nothing to train, so what an earlier run left is still true.
    """
    if world.rank != 0:
        return
    job.set_aside_newer(run.store)
    if not finished:
        run.outdate_full_model()
    if not (finished and run.config.exists()):  # a finished run keeps what it was trained with
        write_config(run, config, world.world_size)
        for name, content in files.items():
            run.files.write(name, content)

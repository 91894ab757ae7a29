"""Every refusal that needs the machine: world size, data, run directory, checkpoint. All come before the training's
process group: a wrong combination must not cost a group, a download or a run directory."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import chain

import torch
from torch import nn

from fsdp2 import data
from fsdp2.checkpoint.disk import temporary_folder
from fsdp2.config import Config
from fsdp2.options import strategies
from fsdp2.options.checks import trackers_of
from fsdp2.options.errors import ConfigError, refused, require
from fsdp2.options.own_model import blocks_of
from fsdp2.options.parser import files_at
from fsdp2.parallel.freeze import freeze
from fsdp2.parallel.groups import check_parameters, shard_groups
from fsdp2.run.directory.hold import Hold
from fsdp2.run.directory.room import check_room, full_model_form
from fsdp2.run.directory.rundir import RunDir, default_path
from fsdp2.run.job import Job
from fsdp2.run.process.runtime import World
from fsdp2.run.start import begin

OLDEST_TORCH = (2, 11)


def examine_first(config: Config, world: World, device: torch.device) -> None:
    """With `--doctor`, examine the ranks before they train. A collective call. Raises ConfigError for what is bad."""
    if config.doctor:
        from fsdp2.run.beside import tool

        tool("--doctor", "doctor.examine").before_training(config, world, device)


def preflight(config: Config, world: World) -> Job:
    """Check everything; on rank 0 also take the run directory and find the checkpoint to resume from.

    Raises ConfigError: one line that names the flag and the fix.
    """
    check_versions(config)
    if world.rank == 0 and trackers_of(config):
        from fsdp2_extra.trackers.logins import require_trackers

        require_trackers(config)
    check_world(config, world)
    check_data(config, read=world.rank == 0)
    model = check_model(config)
    place = str(default_path(config.model).absolute()) if config.run_dir is None else config.run_dir
    if "://" in place:
        check_url(place, world)
    tensors = chain(model.named_parameters(), model.named_buffers())
    made_of = repr([(name, tuple(one.shape), one.dtype) for name, one in tensors])
    job = Job(Hold(RunDir(place)), made_of)
    with ExitStack() as on_error:
        on_error.enter_context(job.hold)
        if config.nvme_offload is not None:
            from fsdp2_extra.baselines.swap_files import SwapFiles

            job.hold.also(SwapFiles(config.nvme_offload, world.rank).release)
        if world.rank == 0:
            begin(config, world, model, job)
        elif world.local_rank == 0:
            check_room(config, model, world)
        on_error.pop_all()
    return job


def check_model(config: Config) -> nn.Module:
    """The model on `meta`, frozen as `--freeze` says. Raises ConfigError if it can't be built, or sharded as asked."""
    flag = f"--model {config.model}"
    with refused(flag):
        model = config.spec.on_meta(config.model_size)
    with refused("--shard-modules" if config.shard_modules else flag):
        blocks = blocks_of(config)(model)
    if config.spec.kind == "language":
        from fsdp2.models.positions import too_long

        if why := too_long(config.spec, model, blocks, config.seq_len):
            raise ConfigError(f"--seq-len {config.seq_len}: is more than {flag} has positions for ({why}); lower it")
    for name in config.spec.methods:
        if not callable(getattr(model, name, None)):
            raise ConfigError(f"{flag}: its ModelSpec has the method {name}, and {type(model).__name__} doesn't")
    if config.strategy == "fsdp2":
        with refused(f"{flag}: FSDP2 can't shard it"):
            check_parameters(model, shard_groups(model, blocks, config.shard_granularity))
    try:
        freeze(model, config.freeze)
    except ValueError as error:
        raise ConfigError(f"--freeze {error}") from None
    if config.float8:
        from fsdp2_extra.low_precision import float8

        if not any(float8.layers(blocks)):
            raise ConfigError(
                f"--float8 {config.float8} with {flag}: none of its blocks has a trained nn.Linear whose sizes are "
                f"multiples of {float8.MULTIPLE}; drop --float8"
            )
    return model


def torch_version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def check_versions(config: Config) -> None:
    """Raise ConfigError if torch is too old, or a library or compiler that a flag needs is missing."""
    if torch_version(torch.__version__) < OLDEST_TORCH:
        raise ConfigError(
            f"torch {torch.__version__} is installed and {'.'.join(map(str, OLDEST_TORCH))} is the oldest supported; "
            "install a newer torch and the torchvision that belongs to it"
        )
    if config.tp > 1 and config.shard_granularity == "root" and torch_version(torch.__version__) < (2, 13):
        raise ConfigError("--tp with --shard-granularity root: fails before torch 2.13; install that, or drop one")
    for flag, value in (("--optimizer-state", config.optimizer_state), ("--float8", config.float8)):
        if value:
            require("torchao", "torchao", f"{flag} {value}")
    if config.profile:
        require("plotly", "plots", "--profile")
    if config.compile:
        from fsdp2.run.process.compilers import check_compiler

        check_compiler("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")


def check_world(config: Config, world: World) -> None:
    """Raise ConfigError for flags that don't fit the number of ranks."""
    size = world.world_size
    strategies.check_world(config, size)
    for flag, count, ranks in (
        ("--tp", config.tp, size),
        ("--sp", config.sp, size // config.tp),
        ("--replicas", config.replicas, size // config.tp // config.sp),
    ):
        if ranks % count or not ranks:
            each = "" if ranks == size else f" / {size // ranks}"
            raise ConfigError(
                f"{flag} {count}: doesn't divide the world size {size}{each}; use one of "
                f"{', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}"
            )
    shards = size // config.tp // config.replicas
    n = config.reshard_after_forward
    if n is not None and not isinstance(n, bool) and (shards % n or n >= shards):
        fitting = [str(k) for k in range(2, shards) if shards % k == 0]
        raise ConfigError(
            f"--reshard-after-forward {n}: must be a divisor of the {shards} ranks that shard the model, and fewer "
            f"than they are; use {' or '.join([*fitting, 'true, which reshards to all of them'])}"
        )
    shares = world.share(config.tp, config.sp).of
    least = shares * config.grad_accumulation
    if config.global_batch_size is not None and config.global_batch_size < least:
        raise ConfigError(
            f"--global-batch-size {config.global_batch_size}: is less than one sample for each of {shares} ranks and "
            f"{config.grad_accumulation} microbatches; use {least} or more"
        )
    if config.tp > 1 and full_model_form(config, remote="://" in (config.run_dir or "")) == "sharded":
        raise ConfigError(
            f"--save-model with --tp {config.tp}: a large model is written by all ranks in whole rows, and --tp splits "
            "columns too; add --no-save-model, and python -m fsdp2.checkpoint export writes it from the last checkpoint"
        )


def check_data(config: Config, *, read: bool = True) -> None:
    """Raise ConfigError for data that is missing or can't be read. Without `read` no file of one's own is opened."""
    if config.dataset.startswith(data.OWN):
        from fsdp2_extra.text.refusals import check_own_text

        check_own_text(config, read=read)
    if config.data_root is None:
        return
    missing = data.missing_files(config.dataset, config.data_root)
    if missing:
        raise ConfigError(
            f"--data-root {config.data_root}: {missing[0]} is missing; give the folder above it, in torchvision's "
            "layout, or drop --data-root to download"
        )


def check_url(url: str, world: World) -> None:
    """Raise ConfigError for a run directory's URL that can't be used, or without a folder to collect uploads in."""
    if url.startswith("memory://") and world.world_size > 1:
        raise ConfigError(
            f"--run-dir {url} with {world.world_size} ranks: memory:// lives inside one process, so the shards of the "
            "others would be lost; use a folder that all ranks see"
        )
    files_at(url, "--run-dir")
    try:
        temporary_folder()
    except OSError as error:
        raise ConfigError(f"--run-dir {url}: uploads are collected in a folder first: {error}") from None

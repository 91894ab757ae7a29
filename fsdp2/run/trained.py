"""Load what a run has trained: the full model in one process, or its newest checkpoint sharded over ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp2.checkpoint import meaning
from fsdp2.checkpoint.files import Files, LocalFiles, is_there
from fsdp2.checkpoint.full_file import verdict, vouched_step
from fsdp2.checkpoint.places import open_files
from fsdp2.checkpoint.restore import read_weights
from fsdp2.checkpoint.state import WeightsOnly, plain_names
from fsdp2.checkpoint.store import MARKER, DamagedCheckpoint, read_marker
from fsdp2.checkpoint.weights import OtherWeights, load_weights
from fsdp2.config import Config
from fsdp2.data.loader import Batch
from fsdp2.models.initial import slices_of
from fsdp2.options.errors import ConfigError
from fsdp2.options.own_model import blocks_of
from fsdp2.options.parser import files_at, to_flags
from fsdp2.options.strategies import rules_of
from fsdp2.parallel.autocast import autocast
from fsdp2.parallel.meta import shared_names
from fsdp2.parallelize import parallelize
from fsdp2.run.directory.lock import WriterLock
from fsdp2.run.directory.marker import kept_files
from fsdp2.run.directory.rundir import RunDir, read_config
from fsdp2.run.init_from import require_finite
from fsdp2.run.initial_weights import DrawnWeights, LoadedWeights, not_saved
from fsdp2.run.parts import base_of
from fsdp2.run.process import runtime
from fsdp2.run.process.group import process_group
from fsdp2.run.process.runtime import World
from fsdp2.run.resuming import checkpoint_at
from fsdp2.units import short

# Options that say which model it is, and how it computes; none of those that FSDP2 refuses of another strategy.
OF_THE_MODEL = (
    *("model", "model_size", "trust_remote_code", "lora", "lora_alpha", "lora_targets"),
    *("init_from", "mixed_precision"),
)


@dataclass
class Opened:
    """A run whose model is loaded.

    Attributes:
        forward: a batch -> its outputs. A collective call where the model is sharded.
        weights: in words, where they come from and what vouches for them.
    """

    run: RunDir
    config: Config
    forward: Callable[[Batch], Any]
    world: World
    device: torch.device
    weights: str


Load = Callable[[nn.Module], None]
"""Fills a model, sharded or not. Raises ConfigError."""


def from_file(config: Config, file: Path) -> Load:
    """Make a function that fills a model from a full model."""

    def load(model: nn.Module) -> None:
        tied = shared_names(config.spec.described(config.model_size))
        try:
            load_weights(str(file), plain_names(model), slices_of, tied, partial=False)
        except ValueError as error:
            other = isinstance(error, OtherWeights)
            why = f"isn't of the model that config.json names: {error}" if other else f"can't be loaded ({error})"
            raise ConfigError(f"{short(file)}: {why}; {other_ways(config)}") from None
        require_finite(plain_names(model), short(file))

    return load


def from_checkpoint(config: Config, checkpoint: Files) -> Load:
    """Make a function that fills a sharded model from a sharded checkpoint of any number of ranks."""

    def load(model: nn.Module) -> None:
        start = LoadedWeights(config, restoring=True)
        if start.wanted:
            start(model)
        try:
            beside = {} if config.lora is None else {"base": base_of(config, model)}
            read_weights(WeightsOnly(model, None, not_saved(config), beside), checkpoint)
        except (DamagedCheckpoint, ValueError) as error:
            how = "is damaged" if isinstance(error, DamagedCheckpoint) else "can't be loaded"
            other = "drop --sharded to use full-model.pt, if there is one" if config.lora is None else "put those back"
            raise ConfigError(f"--sharded: the checkpoint {how}: {error}; {other}") from None
        require_finite(plain_names(model), f"--sharded: {short(str(checkpoint))}")

    return load


def load_plain(config: Config, load: Load, device: torch.device) -> Callable[[Batch], Any]:
    """The model in this process alone, as it was built; a function from a batch to its outputs."""
    spec = config.spec
    model: nn.Module = spec.build(config.model_size)
    load(model)
    model.to(device).eval()

    def forward(batch: Batch) -> Any:
        with autocast(device.type, config.mixed_precision):
            return spec.call(model, batch)

    return forward


def load_sharded(config: Config, load: Load, world: World, device: torch.device) -> Callable[[Batch], Any]:
    """The model sharded over these ranks, in the precision that the run evaluated in. A collective call."""
    if config.strategy != "fsdp2":  # its checkpoints are FSDP2's
        config = Config(**{name: getattr(config, name) for name in OF_THE_MODEL})
    spec, everything = config.spec, (lambda name: True)
    engine = parallelize(
        config,
        build=lambda: spec.on_meta(config.model_size),
        blocks_of=blocks_of(config),
        set_weights=DrawnWeights(config, brought=everything),
        load_weights=load,
        device=device,
        world_size=world.world_size,
        training=False,
        brought=everything,
        methods=spec.methods,
    )
    engine.call = spec.call
    engine.model.eval()
    return engine.forward


def vouched(config: Config, run: RunDir) -> str:
    """Say what vouches for the full model of a run.

    Raises ConfigError if it is damaged, or isn't known to be of the run's last state.
    """
    weights = run.full_weights or run.full_model
    file, newest = short(weights), max(run.store.committed(), default=None)
    try:
        step = vouched_step(LocalFiles(run.full_folder), None if weights.is_dir() else weights.name)
    except DamagedCheckpoint as error:
        raise ConfigError(f"{file}: is damaged: {error}; remove it, and then {other_ways(config)}") from None
    if newest is not None and (step is None or step < newest):
        state = "no marker beside it says of which step it is" if step is None else f"is of step {step}"
        raise ConfigError(
            f"{file}: {state}, and the newest checkpoint is of step {newest}: the run has gone on since, or was killed "
            f"while it wrote the file; {other_ways(config)}"
        )
    return verdict(step)


def other_ways(config: Config) -> str:
    """Say what to do about a full model that can't be used."""
    sharded = ", or use --sharded for its newest checkpoint" if rules_of(config.strategy).reads_as_fsdp2 else ""
    return f"give the training's command again, which writes it at its end{sharded}"


def require_same_files(config: Config, folder: Files) -> None:
    """Raise ConfigError if what a run keeps of its model and tokenizer has changed since the weights were saved."""
    if not is_there(folder, MARKER):
        return
    try:
        marker, files = read_marker(folder), kept_files(config)
        if config.model.startswith("hf:"):
            meaning.require_kept(marker, files[meaning.PART], config.model.removeprefix("hf:"))
        meaning.require_kept(
            marker, files.get(meaning.TOKENIZER, {}), config.tokenizer or meaning.TOKENIZER, meaning.TOKENIZER
        )
    except (DamagedCheckpoint, ValueError, OSError) as error:
        raise ConfigError(str(error)) from None


def require_same_adapters(config: Config, checkpoint: Files) -> None:
    """Raise ConfigError if config.json, which nothing hashes, gives adapters another scale than their checkpoint."""
    ours, theirs = to_flags(config), {}
    with suppress(DamagedCheckpoint):  # which loading it says
        theirs = read_marker(checkpoint).get("config", {})
    for flag in ("lora", "lora-alpha", "lora-targets"):
        if flag in theirs and theirs[flag] != ours[flag]:
            raise ConfigError(
                f"{short(str(checkpoint))}: was made with --{flag} {theirs[flag]}, and the run's config.json says "
                f"{ours[flag]}; put the file back that the run wrote"
            )


def _newest(run: RunDir, config: Config) -> tuple[str, Load]:
    """The weights of a run's newest checkpoint: what vouches for them, and what loads them. Raises ConfigError."""
    if not rules_of(config.strategy).reads_as_fsdp2:
        raise ConfigError(f"--sharded: the run's strategy is {config.strategy}, which has no shards; drop --sharded")
    checkpoint = open_files(checkpoint_at(run.place))
    require_same_adapters(config, checkpoint)
    require_same_files(config, checkpoint)
    return f"{short(str(checkpoint))}, verified", from_checkpoint(config, checkpoint)


def _whole(run: RunDir, config: Config, world: World) -> tuple[str, Load, bool]:
    """The full model of a run: what vouches for it, what loads it, and whether to shard it. Raises ConfigError."""
    if world.world_size > 1:
        raise ConfigError("fsdp2.infer under torchrun: one process loads the full model; add --sharded or use python")
    try:
        _fetch_full_model(run)
    except (DamagedCheckpoint, OSError) as error:
        raise ConfigError(f"{run.place}: its full model can't be used ({error}); use --sharded, or finish it") from None
    if run.full_weights is None:
        raise ConfigError(
            f"{short(run.path)}: has no {run.full_model.name}, because the run hasn't finished, had "
            "--no-save-model, its model is large, or --checkpoint-every never left nothing; use --sharded, or "
            "finish it with --save-model"
        )
    weights = f"{short(run.full_weights)}, {vouched(config, run)}"
    require_same_files(config, LocalFiles(run.full_folder))
    # FSDP casts at the edges of its groups, so that alone gives the run's accuracy; DDP has autocast.
    casts = config.mixed_precision is not None and not rules_of(config.strategy).autocasts
    return weights, from_file(config, run.full_weights), casts


def _fetch_full_model(run: RunDir) -> None:
    """Copy a remote run's full model, and the marker that vouches for it, to the run's local folder if it isn't there.

    Raises DamagedCheckpoint if it isn't at the URL, or isn't as its marker says; ConfigError if a run of this machine
    is writing to the folder; OSError.
    """
    if not run.is_remote:
        return
    from fsdp2_extra.remote.copies import fetch_full_model, lacking

    (here, there), name = run.full_folders(), run.full_model.name
    if (marker := lacking(here, there, name)) is not None:
        lock = WriterLock(run.path, flag="RUN")
        try:
            fetch_full_model(here, there, name, marker)
        finally:
            lock.release()


@contextmanager
def open_run(place: Path | str, *, sharded: bool = False, **named: Any) -> Iterator[Opened]:
    """Open a run, its model loaded, in a process group. `place` is its folder or URL; for `named` see `read_config`.

    The full model of a URL is copied to the run's local folder. Raises ConfigError if the run or its model can't be
    used.
    """
    world = runtime.world()
    files_at(str(place), "RUN")  # refuses what is no URL that can be used
    run = RunDir(place)
    config = read_config(run, **named)
    # One forward has no use for offload, replicas or a reshard policy, which may not fit these ranks.
    config = dataclasses.replace(
        config, cpu_offload=False, replicas=1, tp=1, sp=1, reshard_after_forward=None, chunked_loss=None
    )
    if shards := sharded or config.lora is not None:  # adapters alone are in no full model
        weights, load = _newest(run, config)
    else:
        weights, load, shards = _whole(run, config, world)
    device = runtime.pick_device(config.device, world)
    with process_group(world, device):
        runtime.set_threads(config.threads, world)
        forward = load_sharded(config, load, world, device) if shards else load_plain(config, load, device)
        if world.rank == 0:
            print(f"weights: {weights}")
        yield Opened(run, config, forward, world, device, weights)

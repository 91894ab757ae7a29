"""The beginning of a run: its data, the parts of its state, and the files before the first step."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from fsdp2 import data
from fsdp2.checkpoint import kept
from fsdp2.checkpoint.full_dtensor import scatter
from fsdp2.checkpoint.state import AppState, Part, Progress, RandomState, SchedulerState, plain_names
from fsdp2.config import Config
from fsdp2.data.errors import UnusableText
from fsdp2.data.loader import Batches
from fsdp2.data.splits import Dataset
from fsdp2.models.initial import reset_parameters, slices_of
from fsdp2.models.spec import ModelSpec
from fsdp2.options.errors import ConfigError, some
from fsdp2.parallel.engine import Engine
from fsdp2.parallel.meta import shared_names
from fsdp2.run.directory.job import Job
from fsdp2.run.directory.rundir import LINEAGE, RunDir, kept_files, write_config
from fsdp2.run.parts import elsewhere
from fsdp2.run.process.runtime import World
from fsdp2.run.process.together import first_on_node, gather


def blocks_of(config: Config) -> Callable[[nn.Module], Sequence[nn.Module]]:
    """The function that finds the blocks of the model: the flag's, or the model's specification."""
    if config.shard_modules:
        from fsdp2.models.blocks import named_blocks

        return partial(named_blocks, patterns=config.shard_modules)
    return config.spec.blocks


class InitialValues:
    """Sets the initial values of a model, or of a part of one. A collective call where the model has no table.

    Without a table a model's own code says what it starts from. Rank 0 makes it a second time, in its memory and from
    the seed alone, and sends each rank what that holds, one tensor after the other.

    Args:
        brought: whether something else brings what has this name in the state dict: a checkpoint, or a file.
    """

    def __init__(self, config: Config, *, brought: Callable[[str], bool]) -> None:
        self._config, self._brought = config, brought
        self._own: dict[str, Tensor] | None = None

    def __call__(self, model: nn.Module) -> None:
        config, spec, brought = self._config, self._config.spec, self._brought
        if spec.lora is not None:
            from fsdp2.models import lora

            lora.draw_adapters(model, config.seed, brought=brought)

            def brought(name: str) -> bool:
                return lora.is_adapter(name) or self._brought(name)

        if spec.initial_values:
            reset_parameters(model, spec.initial_values, config.seed, brought=brought)
            return
        # A part of a model that a strategy makes has buffers too that the model keeps out of its state dict.
        saved = spec.described(config.model_size).state_dict()
        wanted = {name for name in saved if not brought(name)}
        targets = {name: tensor for name, tensor in plain_names(model).items() if name in wanted}
        if targets:
            scatter(self._drawn() if dist.get_rank() == 0 else {}, targets)

    def _drawn(self) -> dict[str, Tensor]:
        if self._own is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._config.seed)
                self._own = self._config.spec.build(self._config.model_size).state_dict()
        return self._own


class StartWeights:
    """Puts the weights that the run starts from into a model. A collective call; raises ConfigError on every rank.

    Of a model with adapters, these are all weights but the adapters, also where the run goes on from a checkpoint.

    Attributes:
        facts: with `--init-partial`, how many tensors were loaded from where, and a line for each that was left out.
    """

    def __init__(self, config: Config, *, restoring: bool) -> None:
        self._config, self._restoring = config, restoring
        self.wanted = config.weights is not None and (not restoring or config.lora is not None)
        self.facts: dict[str, Any] = {}

    def brings(self, name: str) -> bool:
        """Return whether these, or the checkpoint that the run goes on from, set the weight of this name."""
        config = self._config
        if self._restoring:
            return not config.resume_partial
        if not self.wanted or config.init_partial:
            return False
        return config.lora is None or elsewhere(config)(name)  # of a model with adapters all but these

    def __call__(self, model: nn.Module) -> None:
        from fsdp2.checkpoint.weights import OtherWeights, load_weights
        from fsdp2.models import lora
        from fsdp2.run.init_from import require_finite

        config, place, spec = self._config, str(self._config.weights), self._config.spec
        flag = f"--init-from {place}" if config.init_from else f"--model {config.model}"
        targets = lora.base_weights(spec.lora, plain_names(model))
        tied = [list(lora.base_weights(spec.lora, group)) for group in shared_names(spec.described(config.model_size))]
        own = spec.load is not None and config.init_from is None  # then the model's library knows all of its names
        by_torch = config.dcp_api and not config.init_partial and Path(place).is_file()
        loaded, left_out = len(targets), list[str]()
        try:
            if by_torch and not place.endswith(".safetensors"):
                from fsdp2.checkpoint import full_dcp

                full_dcp.load_full_model_state(model, Path(place))
            else:
                fitting = load_weights(place, targets, slices_of, tied, partial=config.init_partial and not own)
                loaded, left_out = len(fitting.names), list(fitting.left_out)
        except OtherWeights as error:
            if spec.load is None or not own:
                raise ConfigError(f"{flag}: {error}; give weights of this model, or --init-partial") from None
            full, wrong = _by_its_library(partial(spec.load, partial=config.init_partial), flag)
            targets = {name: target for name, target in targets.items() if name not in wrong}
            scatter(full, targets)
            loaded, left_out = len(targets), [f"{name}: {why}" for name, why in wrong.items()]
        except ValueError as error:
            raise ConfigError(f"{flag}: {error}") from None
        require_finite(targets, flag)
        if config.init_partial:
            self.facts = {"weights": place, "loaded": loaded, "left_out": left_out}


def _by_its_library(
    load: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, str]]], flag: str
) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
    """Call `ModelSpec.load`, with the weights on rank 0 alone, in its memory. A collective call."""
    full: Mapping[str, Tensor] = {}
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            full, answer[1] = load()
        except ValueError as error:
            answer[0] = str(error)
    dist.broadcast_object_list(answer, src=0)
    if answer[0] is not None:
        raise ConfigError(f"{flag}: {answer[0]}; use --init-partial for what fits, or --init-from scratch for none")
    return full, answer[1]


def load_data(config: Config, spec: ModelSpec, world: World) -> Dataset:
    """The dataset, whole on every rank; a download happens once on each node, while its other ranks wait."""
    with first_on_node(world):
        dataset = open_data(config, spec)
    hosts, contents = zip(*gather((socket.gethostname(), (dataset.train.content, dataset.test.content))), strict=True)
    others = [rank for rank, content in enumerate(contents) if content != contents[0]]
    if others:
        theirs = some(sorted({hosts[rank] for rank in others}))
        raise ConfigError(
            f"--dataset {config.dataset}: the data of rank{'s' * (len(others) > 1)} {some(others)} ({theirs}) isn't "
            f"rank 0's ({hosts[0]}), so samples would be repeated or left out; give files that are the same on all "
            "nodes"
        )
    return dataset


def open_data(config: Config, spec: ModelSpec, *, fetch: bool = True) -> Dataset:
    """The dataset of this process. Raises ConfigError, and NotHere where `fetch` is false and it has to be fetched."""
    try:
        return data.load(
            config.dataset,
            root=config.data_root,
            seq_len=config.seq_len,
            vocab_size=spec.vocab_size(config.model_size),
            task=spec.task,
            special_token=spec.special_token,
            tokenizer=tokenizer_of(config),
            text_field=config.text_field,
            bos=config.bos,
            apart=config.documents == "apart",
            fetch=fetch,
            say=_say,
        )
    except data.DownloadFailed as error:
        raise ConfigError(str(error)) from None
    except UnusableText as error:
        raise ConfigError(f"--dataset: {error}") from None


def _say(text: str) -> None:
    print(f"fsdp2: {socket.gethostname()}: --dataset: {text}", file=sys.stderr, flush=True)


def tokenizer_of(config: Config) -> str:
    """The flag's, else the model's own, else bytes."""
    own = config.spec.weights
    has_own = own is not None and (own / "tokenizer.json").is_file()
    return config.tokenizer or (str(own) if has_own else "bytes")


def try_out(config: Config, engine: Engine, dataset: Dataset, device: torch.device) -> None:
    """Raise ConfigError on every rank if a language model doesn't do what was asked, which only a forward tells.

    A collective call.
    """
    if config.spec.kind == "language":
        from fsdp2.run import trial

        trial.try_out(config, engine, dataset, device)


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
    taken = sorted({"model", "optim", *parts} & set(also_saved or {}))
    if taken:
        raise ValueError(f"also_saved: {', '.join(taken)} is a part of each checkpoint already; choose another name")
    state, parts = engine.state, {**parts, **(also_saved or {})}
    return AppState(state["model"], state["optimizer"], parts, engine, engine.elsewhere)


class Memory(Protocol):
    """The interface that the start needs of the checkpoints in memory."""

    def begin(self, run: RunDir, app: AppState) -> None:
        """Make ready to save, and invalidate those of earlier starts. Raises ConfigError before it has done so."""


def write_start(
    config: Config,
    job: Job,
    run: RunDir,
    world: World,
    app: AppState,
    memory: Memory | None,
    files: Mapping[str, bytes],
    *,
    finished: bool,
) -> None:
    """Write what a run directory holds before the first step, and put aside what this run replaces, in memory too.

    Args:
        files: further ones by name, the engine's own.
        finished: there is nothing to train, so what an earlier run left is still true.
    """
    if memory is not None:
        memory.begin(run, app)
    if world.rank != 0:
        return
    if memory is None and run.files.size(LINEAGE) is not None:
        run.files.unlink(LINEAGE)
    job.set_aside_newer(run.store)
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
        kept.replace(run.files.at(kept.TOKENIZER), kept_files(config).get(kept.TOKENIZER, {}))

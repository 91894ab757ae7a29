"""Two steps and an evaluation of the real program, as one rank of many, on tensors that have no memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fsdp2.config import Config
from fsdp2.data import sampler
from fsdp2.data.loader import Batch
from fsdp2.memory.phases import Phases
from fsdp2.memory.recorder import Recorder
from fsdp2.memory.timeline import Timeline
from fsdp2.models import ModelSpec
from fsdp2.options.errors import ConfigError
from fsdp2.parallel.baselines import BASELINES
from fsdp2.parallel.baselines.rules import Start
from fsdp2.parallel.engine import Engine
from fsdp2.parallel.inspect import local
from fsdp2.parallelize import parallelize
from fsdp2.plan import fake
from fsdp2.plan.depth import shorten
from fsdp2.plan.fake_ledger import FakeLedger
from fsdp2.plan.work import Work
from fsdp2.run.parts import add_parts
from fsdp2.run.runtime import World
from fsdp2.run.start import blocks_of
from fsdp2.train import train_step

STEPS = 2  # the first makes what later ones find: gathered buffers, gradients' memory
PLANNED = ("fsdp2", "none")


@dataclass
class Execution:
    """What one rank did.

    Attributes:
        timeline: every allocation of the steps and the evaluation. Its times are of the planning, and only their order
            says something.
        blocks: the names of the model's blocks, in forward order.
        head: the name of the layer that makes the logits, of a model that tells.
        model_bytes, optimizer_bytes: of this rank's parameters and buffers, and of its optimizer's state.
        average_bytes: of `--ema`.
        work: every operator, in the order in which they were issued.
    """

    rank: int
    timeline: Timeline
    blocks: list[str]
    head: str | None
    model_bytes: int
    optimizer_bytes: int
    average_bytes: int
    work: list[Work]


def execute(config: Config, ranks: int, rank: int, blocks: int | None = None) -> Execution:
    """Run `config` as one rank, with so many of the model's blocks. Raises ConfigError if it can't without values."""
    if config.strategy not in PLANNED:
        raise ConfigError(
            f"--strategy {config.strategy}: its engine copies values that a plan doesn't have; plan "
            f"{' or '.join(PLANNED)}, or measure it with python -m fsdp2.compare"
        )
    # A compiler reads values while it works, and whether losses are finite nobody knows.
    config = dataclasses.replace(config, compile=False, on_nonfinite="continue")
    world, device = World(rank, ranks, rank, ranks), torch.device("cpu")
    ledger = FakeLedger(fake=True)
    with fake.fake_group(rank, ranks), ExitStack() as modes:
        try:
            return _execute(config, world, device, ledger, modes, blocks)
        except fake.data_dependent() as error:
            operator = getattr(error, "func", None) or str(error).partition("\n")[0]
            raise ConfigError(
                f"--model {config.model}: can't be planned, since {ledger.module or 'it'} reads values ({operator}) to "
                "decide what to compute; measure it with python -m fsdp2.train --memory-snapshot on a few ranks"
            ) from error


def _execute(
    config: Config, world: World, device: torch.device, ledger: FakeLedger, modes: ExitStack, blocks: int | None
) -> Execution:
    spec = config.spec
    engine = make_engine(config, spec, world, device, modes, fake.Values(lambda: ledger.in_model), blocks)
    recorder = Recorder(engine, device, {"rank": world.rank}, None, None)
    recorder.ledger = ledger
    with Phases(engine, SimpleNamespace(save=lambda: None), lambda: ledger.steps_done) as phases, recorder:
        phases.listeners.append(recorder.phase)
        for _ in range(STEPS):
            train_step(engine, microbatches(config, spec, world, ledger), spec, config, world, [False, False])
            ledger.steps_done += 1
        ledger.phase("evaluation", STEPS)
        with engine.evaluating():
            batch = made_up(config, spec, config.test_batch_size, world.world_size, last=True)
            ledger.mark("data", _tensors(batch))
            spec.scored(engine.forward(batch), batch.targets)
            del batch
    held = engine.held()
    average = engine.ema.averages.values() if engine.ema is not None else ()
    named = {module: name for name, module in engine.model.named_modules()}
    return Execution(
        world.rank,
        recorder.timeline(),
        [named[block] for block in blocks_of(config)(engine.model)],
        named.get(spec.head(engine.model)) if spec.head is not None else None,
        model_bytes=_bytes([*held["parameters"], *held["buffers"]]),
        optimizer_bytes=_bytes(held["optimizer"]),
        average_bytes=_bytes(average),
        work=ledger.watching.done,
    )


def make_engine(
    config: Config,
    spec: ModelSpec,
    world: World,
    device: torch.device,
    modes: ExitStack,
    values: fake.Values,
    blocks: int | None,
) -> Engine:
    """As `fsdp2.train` makes it, but that nobody sets initial values."""

    def build() -> nn.Module:
        model = spec.on_meta(config.model_size)
        if blocks is not None:
            shorten(model, blocks_of(config), blocks)
        fake.enter_with_memory(model, modes, fake.fake_mode(), values)
        return model

    arguments: dict[str, Any] = {
        "build": build,
        "blocks_of": blocks_of(config),
        "set_weights": lambda model: None,
        "load_weights": None,
        "brought": lambda name: True,
        "device": device,
        "world_size": world.world_size,
    }
    if config.strategy == "fsdp2":
        engine: Engine = parallelize(config, methods=spec.methods, **arguments)
    else:
        engine = BASELINES[config.strategy].build(config, Start(**arguments))
    engine.call = spec.call
    # Of adapters only their base's checksum would be added, which needs values.
    add_parts(dataclasses.replace(config, lora=None, lora_alpha=None, lora_targets=()), engine)
    return engine


def microbatches(config: Config, spec: ModelSpec, world: World, ledger: FakeLedger) -> Iterator[Batch]:
    """Those of one step, each made when it is asked for: of more than three the first two, the largest, and the last.

    The second finds the gradients of the first, and those between it and the last find the same.
    """
    samples = config.global_batch(world.world_size)
    sizes = sampler.microbatch_sizes(samples, world.rank, world.world_size, config.grad_accumulation)
    sizes = sizes if len(sizes) <= 3 else [*sizes[:2], sizes[-1]]
    for index, size in enumerate(sizes):
        batch = made_up(config, spec, size, samples, last=index == len(sizes) - 1)
        ledger.mark("data", _tensors(batch))
        yield batch


def made_up(config: Config, spec: ModelSpec, size: int, samples: int, *, last: bool) -> Batch:
    """A batch as the data set of the flags gives it; a placeholder of one row for a rank that has no sample."""
    rows = max(size, 1)
    vocabulary = spec.vocab_size(config.model_size)
    inputs: Any
    if vocabulary is None:
        inputs, targets = torch.empty(rows, 1, 28, 28), torch.empty(rows, dtype=torch.int64)
    else:
        inputs, targets = _language(config, spec, rows)
    return Batch(inputs, targets, size > 0, samples, samples * targets[0].numel(), last)


def _language(config: Config, spec: ModelSpec, rows: int) -> tuple[Any, Tensor]:
    length = config.seq_len
    if spec.task == "seq2seq":
        half = length // 2
        first, second = (torch.empty(rows, part, dtype=torch.int64) for part in (half, length - half))
        return {"input_ids": first, "decoder_input_ids": second}, torch.empty_like(second)
    if spec.task == "masked":
        return torch.empty(rows, length, dtype=torch.int64), torch.empty(rows, length, dtype=torch.int64)
    tokens = torch.empty(rows, length + 1, dtype=torch.int64)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if config.documents == "apart" and config.dataset.startswith(("text:", "chat:")):
        positions, documents = (torch.empty(rows, length, dtype=torch.int64) for _ in range(2))
        return {"input_ids": inputs, "position_ids": positions, "document_ids": documents}, targets
    return inputs, targets


def _tensors(batch: Batch) -> list[Tensor]:
    inputs = list(batch.inputs.values()) if isinstance(batch.inputs, dict) else [batch.inputs]
    return [*inputs, batch.targets]


def _bytes(tensors: Any) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)

"""Two steps and an evaluation of the real program, as one rank of many, on tensors that have no memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fsdp2 import data
from fsdp2.config import Config
from fsdp2.evaluate import scored
from fsdp2.models.attention import kernels
from fsdp2.models.spec import ModelSpec
from fsdp2.options.checks import attention_refusals
from fsdp2.options.errors import ConfigError
from fsdp2.options.own_model import blocks_of
from fsdp2.options.strategies import refuse
from fsdp2.parallel.engine import Engine
from fsdp2.parallel.rules import Start
from fsdp2.parallel.shards import local
from fsdp2.run.directory.room import full_model_form
from fsdp2.run.initial_weights import not_saved
from fsdp2.run.parts import add_parts
from fsdp2.run.process.runtime import World
from fsdp2.train import engine_of, train_step
from fsdp2_extra.allocations.phases import Phases
from fsdp2_extra.allocations.recorder import Recorder
from fsdp2_extra.allocations.timeline import Timeline
from fsdp2_tools.plan import batches, fake
from fsdp2_tools.plan.depth import depths, shorten
from fsdp2_tools.plan.fake_ledger import FakeLedger
from fsdp2_tools.plan.saving import Saving, starting_from
from fsdp2_tools.plan.work import Work

STEPS = 2  # the first makes what later ones find: gathered buffers, gradients' memory
PLANNED = ("fsdp2", "none")

Number = TypeVar("Number", int, float)


@dataclass
class Execution:
    """The execution of one rank.

    Attributes:
        timeline: every allocation of the steps and the evaluation. Its times are of the planning, and only their order
            says something.
        blocks: the names of the model's blocks, in forward order.
        head: the name of the layer that makes the logits, of a model that tells.
        model_bytes, optimizer_bytes: of this rank's parameters and buffers, and of its optimizer's state.
        saved_bytes: of what of the model is in a checkpoint.
        average_bytes: of `--ema`.
        starting: what loading other weights has allocated, before there was an optimizer; None if none are loaded.
        work: every operator, in the order in which they were issued.
    """

    rank: int
    timeline: Timeline
    blocks: list[str]
    head: str | None
    model_bytes: int
    saved_bytes: int
    optimizer_bytes: int
    average_bytes: int
    work: list[Work]
    starting: Timeline | None

    @property
    def phases(self) -> list[str]:
        """The names of the phases, by their numbers."""
        return [phase.name for phase in self.timeline.phases]

    def last_step(self, names: Sequence[str]) -> list[Work]:
        """The work of the last step in phases of these names."""
        phases = self.timeline.phases
        return [one for one in self.work if phases[one.phase].step == STEPS and phases[one.phase].name in names]


@dataclass(frozen=True)
class Runs:
    """The executions that a plan is drawn from.

    Attributes:
        longer: of the whole model, or of one with fewer of its equal blocks.
        short: of one with fewer blocks by a group; None if the whole model was executed.
        times: how many groups of blocks the whole model has more than `longer`.
    """

    longer: Execution
    short: Execution | None
    times: int

    def whole(self, of: Callable[[Execution], Number]) -> Number:
        """A number of the whole model, by what it is of the models that were executed."""
        return of(self.longer) if self.short is None else self.further(of(self.short), of(self.longer))

    def further(self, short: Number, longer: Number) -> Number:
        """A number of the whole model: each group of blocks that `longer` lacks adds what its last one did."""
        return longer + self.times * (longer - short)


def run(config: Config, ranks: int, rank: int, *, gloo: bool) -> Runs:
    """Execute `config` as one rank of many, as `execute` does and raising what it raises."""
    depth = depths(config)
    if depth is None:
        return Runs(execute(config, ranks, rank, gloo=gloo), None, 0)
    whole, fewer, more = depth
    short, longer = (execute(config, ranks, rank, count, gloo=gloo) for count in (fewer, more))
    return Runs(longer, short, (whole - more) // (more - fewer))


def execute(config: Config, ranks: int, rank: int, blocks: int | None = None, *, gloo: bool = True) -> Execution:
    """Run `config` as one rank, with so many of the model's blocks. Raises ConfigError if it can't without values.

    Args:
        gloo: the ranks are on CPUs, and gloo reduces in a copy.
    """
    if config.strategy not in PLANNED:
        raise ConfigError(
            f"--strategy {config.strategy}: its engine copies values that a plan doesn't have; plan "
            f"{' or '.join(PLANNED)}, or measure it with python -m fsdp2.compare"
        )
    if config.float8:
        raise ConfigError(
            f"--float8 {config.float8}: a plan executes on a CPU, where it is emulated in other steps and memory; "
            "plan without it, which is near in memory, and measure its time with python -m fsdp2.train"
        )
    # A compiler reads values while it works, and nobody knows whether losses are finite.
    config = dataclasses.replace(_attending(config, gloo=gloo), compile=False, on_nonfinite="continue")
    world, device = World(rank, ranks, rank, ranks), torch.device("cpu")
    ledger = FakeLedger(fake=True, gloo=gloo)
    batches.samples(config.dataset, config.seq_len)  # while tensors have values
    if config.optimizer_state == "8bit":
        from fsdp2_extra.low_precision.low_bit import tables  # torchao is an extra

        tables()

    def on_rank() -> Execution:
        looking_away = fake.propagation_told(FakeLedger.look_away)
        with fake.fake_group(rank, ranks), looking_away, kernels(config.attention), ExitStack() as modes:
            return _steps(config, world, device, ledger, modes, blocks)

    with fake.fake_mode():
        pass  # torch 2.11 crashes once the first thread that has entered it ends, so that one is this thread
    try:
        # In a thread of its own: DTensor remembers what it has made of a mesh for the life of a thread, and would find
        # the groups of another rank.
        with ThreadPoolExecutor(1, "rank") as thread:
            return thread.submit(on_rank).result()
    except RuntimeError as error:
        reads = isinstance(error, fake.data_dependent())
        if not reads and not ledger.module:
            raise
        operation = getattr(error, "func", None) or str(error).partition("\n")[0]
        how = "reads values to decide what to compute" if reads else "fails on tensors without values"
        raise ConfigError(
            f"--model {config.model}: can't be planned, since its {ledger.phases[-1].name} {how} ({operation}); "
            "measure it with python -m fsdp2.train --memory-snapshot on a few ranks"
        ) from error


def _attending(config: Config, *, gloo: bool) -> Config:
    """Return `config` with an attention that takes on this CPU what its own takes where it will run.

    FlexAttention holds what a flash kernel holds, and computes at most what that does of one document in each row. The
    kernels but `math` differ in nothing that is counted. Raises ConfigError for what can't attend so.
    """
    refuse(attention_refusals(config, "cpu" if gloo else "cuda"))
    flex = config.attention == "flex" or (config.attention == "auto" and config.spec.flex_for_documents)
    if flex and not gloo and config.documents == "apart" and config.dataset.startswith(data.OWN):
        config = dataclasses.replace(config, documents="together")
    return dataclasses.replace(config, attention="math" if config.attention == "math" else "auto")


def _steps(
    config: Config, world: World, device: torch.device, ledger: FakeLedger, modes: ExitStack, blocks: int | None
) -> Execution:
    spec = config.spec
    values, starting = fake.Values(lambda: ledger.in_model), list[Timeline]()
    ledger.values = values
    load = starting_from(config, starting, STEPS, values) if config.weights is not None else None
    # Before tensors are fake, and watched: it builds the whole model.
    gathers = full_model_form(config, remote="://" in (config.run_dir or "")) == "gathered"
    engine = engine_without_values(config, spec, world, device, modes, values, blocks, load)
    if config.model.startswith("hf:"):
        modes.enter_context(fake.seen_by_transformers(values))
    recorder = Recorder(engine, device, {"rank": world.rank}, None, None)
    recorder.ledger = ledger
    saves_nothing = SimpleNamespace(save=None, write_full_model=None)
    with Phases(engine, saves_nothing, lambda: ledger.steps_done) as phases, recorder:
        phases.listeners.append(recorder.phase)
        saving = Saving(config, engine, world, ledger, gathers=gathers)
        saving.restore(0, reads=False)  # left out of the plan: DTensor makes tensors to learn shapes, and then knows
        saving.restore(STEPS + 1)
        order = batches.order(config)
        ledger.mark("data", [order])
        for step in range(STEPS):
            if step and config.async_checkpoint is not None:
                saving.save(step)  # its copies are there in all later steps
            parts = batches.microbatches(config, spec, world, ledger)
            # As the loop does, which reports a step while the next one runs.
            reported = train_step(engine, parts, config, world, [False, False])
            ledger.steps_done += 1
        del order
        ledger.phase("evaluation", STEPS)
        with engine.evaluating():
            scored(engine.forward, spec, batches.evaluation_batches(config, spec, world, ledger), device)
        if config.saves:
            saving.save(STEPS + 1)
        saving.write_full_model(STEPS + 1)
        del reported
    held = engine.held()
    named = {module: name for name, module in engine.model.named_modules()}
    return Execution(
        rank=world.rank,
        timeline=recorder.timeline(),
        blocks=[named[block] for block in blocks_of(config)(engine.model)],
        head=named.get(spec.head(engine.model)) if spec.head is not None else None,
        model_bytes=_bytes([*held["parameters"], *held["buffers"]]),
        saved_bytes=_bytes(saved_of(config, engine.model)),
        optimizer_bytes=_bytes(held["optimizer"]),
        average_bytes=_bytes(engine.ema.averages.values() if engine.ema is not None else ()),
        work=ledger.watching.done,
        starting=starting[0] if starting else None,
    )


def engine_without_values(
    config: Config,
    spec: ModelSpec,
    world: World,
    device: torch.device,
    modes: ExitStack,
    values: fake.Values,
    blocks: int | None,
    load_weights: Callable[[nn.Module], None] | None = None,
) -> Engine:
    """The engine of a run, whose model has shapes and fake memory, so that nobody sets initial values."""

    def build() -> nn.Module:
        model = spec.on_meta(config.model_size)
        if blocks is not None:
            shorten(model, blocks_of(config), blocks)
        fake.enter_with_memory(model, modes, fake.fake_mode(), values)
        return model

    start = Start(
        build=build,
        blocks_of=blocks_of(config),
        set_weights=lambda model: None,
        load_weights=load_weights,
        brought=lambda name: True,
        device=device,
        world_size=world.world_size,
    )
    engine = engine_of(config, start)
    # For adapters, add_parts would only add a checksum of the base, which needs values.
    add_parts(dataclasses.replace(config, lora=None, lora_alpha=None, lora_targets=(), lora_dropout=0.0), engine)
    return engine


def saved_of(config: Config, model: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a model that a checkpoint holds: of one with adapters, these."""
    left_out = not_saved(config)
    return [one for name, one in (*model.named_parameters(), *model.named_buffers()) if not left_out(name)]


def _bytes(tensors: Any) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)

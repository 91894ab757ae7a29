"""How long an optimizer step takes: its operators and collectives, on FSDP2's schedule, at the rates of a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp2.config import Config
from fsdp2_tools.plan import links
from fsdp2_tools.plan.execute import STEPS, Execution
from fsdp2_tools.plan.memory import Runs
from fsdp2_tools.plan.schedule import BACKWARD, FORWARD, Event, Group, Replay, averaged, deepened, events, replay
from fsdp2_tools.plan.speed import Speed
from fsdp2_tools.plan.work import COMPUTE, COPY_IN, COPY_OUT, REDUCE_IN, Work

TRAINED = ("data", FORWARD, BACKWARD)  # an early all-gather is issued before the data is there


@dataclass(frozen=True)
class StepTime:
    """The time of an optimizer step of one rank.

    Attributes:
        milliseconds: of the step. `low` and `high` are with all rates of the table higher and lower by its `spread`.
        compute_ms: of kernels of the computation.
        exposed_ms: in which the computation waits for exchanges.
        idle_ms: in which it waits for the CPU.
        groups: exchanges of FSDP2, those with the most exposed first; times of one exchange, on average.
        samples_per_second, tokens_per_second: of all ranks; tokens are None for a model without.
        mfu: the model's FLOPs, without recomputation and with attention as if it weren't causal, by the GPU's peak.
    """

    milliseconds: float
    low: float
    high: float
    compute_ms: float
    exposed_ms: float
    idle_ms: float
    groups: tuple[Group, ...]
    samples_per_second: float
    tokens_per_second: float | None
    mfu: float


def step_time(config: Config, ranks: int, runs: Runs, speed: Speed) -> StepTime:
    """The time of one optimizer step of the rank that was executed."""
    usual, fast, slow = (whole_step(config, runs, speed.scaled(f)) for f in (1.0, 1 + speed.spread, 1 - speed.spread))
    samples = config.global_batch(ranks)
    dtype = {"bf16": "bf16", "fp16": "fp16"}.get(config.mixed_precision or "", "fp32")
    flops = 3 * _forward_flops(config, ranks, runs)
    return StepTime(
        usual.seconds * 1e3,
        fast.seconds * 1e3,
        slow.seconds * 1e3,
        usual.compute * 1e3,
        usual.exposed * 1e3,
        usual.idle * 1e3,
        tuple(averaged(usual.groups)),
        samples / usual.seconds,
        samples * config.seq_len / usual.seconds if config.spec.kind == "language" else None,
        flops / usual.seconds / speed.flops[dtype],
    )


def whole_step(config: Config, runs: Runs, speed: Speed) -> Replay:
    """Forward and backward replayed with all blocks and microbatches, and the optimizer after them."""
    whole = replayed(runs, speed, config, 0)
    more = config.grad_accumulation - 3
    if more > 0:
        # The second of three is repeated: a fourth tells what each of them adds.
        longer = replayed(runs, speed, config, 1)
        whole = _added(whole, longer, whole, more)
    last = _rest(runs.longer, speed, config)
    if runs.short is not None:
        last += runs.times * (last - _rest(runs.short, speed, config))
    whole.seconds += last
    whole.compute += last
    return whole


def _added(base: Replay, second: Replay, first: Replay, times: int) -> Replay:
    """`base` and so many times what `second` has more than `first`."""

    def further(name: str) -> float:
        return float(getattr(base, name) + times * (getattr(second, name) - getattr(first, name)))

    groups = {}
    for key, group in base.groups.items():
        after, before = second.groups.get(key, group), first.groups.get(key, group)
        values = {n: getattr(group, n) + times * (getattr(after, n) - getattr(before, n)) for n in _SUMS}
        groups[key] = Group(*key, **values)
    return Replay(further("seconds"), further("compute"), further("exposed"), further("idle"), groups)


_SUMS = ("count", "milliseconds", "compute", "exposed")


def replayed(runs: Runs, speed: Speed, config: Config, more: int = 0) -> Replay:
    """Forward and backward of a step, with `more` microbatches like the second one."""
    done = runs.longer
    phases = [phase.name for phase in done.timeline.phases]
    found = _priced(done, speed, config, TRAINED)
    if runs.short is not None:
        group = len(done.blocks) - len(runs.short.blocks)
        first = len(done.blocks) // 2 // group * group
        found = deepened(found, phases, first, group, runs.times)
    if more:
        # A phase begins where its number changes, so the copies need numbers of their own.
        starts = [n for n in sorted({event.phase for event in found}) if phases[n] == FORWARD]
        part = [event for event in found if starts[1] <= event.phase < starts[2]]
        where = next(i for i, event in enumerate(found) if event.phase >= starts[2])
        copies = []
        for _ in range(more):
            numbers = {number: len(phases) + i for i, number in enumerate(sorted({event.phase for event in part}))}
            phases += [phases[number] for number in numbers]
            copies += [dataclasses.replace(event, phase=numbers[event.phase]) for event in part]
        found = [*found[:where], *copies, *found[where:]]
    names = set(done.blocks)
    return replay(found, phases, lambda event: _name(event, names), on_cpu=speed.on_cpu)


def _name(event: Event, blocks: set[str]) -> str:
    """A readable name of a group: a block, or the module that is gathered."""
    name = event.module
    while name and name not in blocks:
        name = name.rpartition(".")[0]
    return "block" if name else event.module or "root"


def _rest(done: Execution, speed: Speed, config: Config) -> float:
    """Seconds of clipping, optimizer and what the loop does after it, where nothing overlaps.

    With `--cpu-offload` these run on the CPU, whose memory is taken to be as fast as the link to it.
    """
    if config.cpu_offload:
        speed = dataclasses.replace(speed, memory=speed.host)
    found = _priced(done, speed, config, ("optimizer", "between"))
    phases = [phase.name for phase in done.timeline.phases]
    return replay(found, phases, lambda event: "", on_cpu=speed.on_cpu).seconds


def _priced(done: Execution, speed: Speed, config: Config, names: Sequence[str]) -> list[Event]:
    """The events of the last step in these phases."""
    phases = done.timeline.phases
    block_of = _numbers(done.blocks)
    there = [w for w in done.work if phases[w.phase].step == STEPS and phases[w.phase].name in names]
    return events(there, [phase.name for phase in phases], block_of, lambda work: price(work, speed, config), speed)


def price(work: Work, speed: Speed, config: Config) -> float:
    """Seconds of an operator or a collective.

    With `--cpu-offload` a shard comes over the link to the machine's memory before it is gathered, and its gradient
    goes back over it, in fp32.
    """
    wide = 2 if config.mixed_precision else 1  # fp32 for what is gathered in a narrower dtype
    if work.role in (COMPUTE, COPY_OUT, REDUCE_IN):
        return work.seconds(speed)
    if work.role == COPY_IN:
        moved = wide * work.bytes / 2 if config.cpu_offload else 0
        return work.seconds(speed) + moved / speed.host
    seconds = links.seconds(work.role, work.bytes, work.ranks, speed)
    if work.role == "reduce-scatter" and config.cpu_offload:
        seconds += work.bytes / work.ranks[0] / speed.host
    return seconds


def _numbers(blocks: Sequence[str]) -> Callable[[str], int | None]:
    index = {name: number for number, name in enumerate(blocks)}
    known: dict[str, int | None] = {}

    def block_of(module: str) -> int | None:
        if module not in known:
            name = module
            while name and name not in index:
                name = name.rpartition(".")[0]
            known[module] = index.get(name)
        return known[module]

    return block_of


def _forward_flops(config: Config, ranks: int, runs: Runs) -> int:
    """Of a rank's forward passes in one step, as an MFU counts them."""

    def of(done: Execution) -> int:
        phases = done.timeline.phases
        counts: dict[int, int] = {}
        for work in done.work:
            if phases[work.phase].step == STEPS and phases[work.phase].name == FORWARD:
                counts[work.phase] = counts.get(work.phase, 0) + work.full
        each = list(counts.values())
        more = config.grad_accumulation - len(each)
        return sum(each) + (more * each[1] if more > 0 and len(each) > 1 else 0)

    last = of(runs.longer)
    return last if runs.short is None else last + runs.times * (last - of(runs.short))

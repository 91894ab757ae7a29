"""The time of an optimizer step: its operators and collectives, on FSDP2's schedule, at the rates of a GPU."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fsdp2.config import Config
from fsdp2_extra.allocations.ledger import enclosing
from fsdp2_tools.plan import links
from fsdp2_tools.plan.batches import MICROBATCHES
from fsdp2_tools.plan.execute import Execution, Runs
from fsdp2_tools.plan.schedule import BACKWARD, FORWARD, Event, Group, Replay, averaged, deepened, events, replay
from fsdp2_tools.plan.speed import Speed
from fsdp2_tools.plan.work import COMPUTE, COPY_IN, COPY_OUT, REDUCE_IN, Work

REPLAYED = ("data", FORWARD, BACKWARD)  # an early all-gather is issued before the data is there


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
    spreads = (1.0, 1 + speed.spread, 1 - speed.spread)
    usual, fast, slow = (whole_step(config, ranks, runs, speed.scaled(f)) for f in spreads)
    samples = config.global_batch(ranks)
    dtype = {"bf16": "bf16", "fp16": "fp16"}.get(config.mixed_precision or "", "fp32")
    flops = 3 * _forward_flops(config, ranks, runs)
    return StepTime(
        milliseconds=usual.seconds * 1e3,
        low=fast.seconds * 1e3,
        high=slow.seconds * 1e3,
        compute_ms=usual.compute * 1e3,
        exposed_ms=usual.exposed * 1e3,
        idle_ms=usual.idle * 1e3,
        groups=tuple(averaged(usual.groups)),
        samples_per_second=samples / usual.seconds,
        tokens_per_second=samples * config.seq_len / usual.seconds if config.spec.kind == "language" else None,
        mfu=flops / usual.seconds / speed.flops[dtype],
    )


def whole_step(config: Config, ranks: int, runs: Runs, speed: Speed) -> Replay:
    """Forward and backward replayed with all blocks and microbatches, and the optimizer after them."""
    whole = replayed(runs, speed, config, 0)
    more = config.accumulation(ranks) - MICROBATCHES
    if more > 0:
        # The second of three is repeated: a fourth tells what each of them adds.
        whole = _added(whole, replayed(runs, speed, config, 1), more)
    last = runs.whole(lambda done: _rest(done, speed, config))
    return dataclasses.replace(whole, seconds=whole.seconds + last, compute=whole.compute + last)


def _added(base: Replay, longer: Replay, times: int) -> Replay:
    """`base` and so many times what `longer` has more."""

    def further(one: object, more: object, *names: str) -> dict[str, Any]:
        return {n: getattr(one, n) + times * (getattr(more, n) - getattr(one, n)) for n in names}

    groups = {
        key: Group(*key, **further(one, longer.groups.get(key, one), "count", "milliseconds", "compute", "exposed"))
        for key, one in base.groups.items()
    }
    return Replay(**further(base, longer, "seconds", "compute", "exposed", "idle"), groups=groups)


def replayed(runs: Runs, speed: Speed, config: Config, more: int = 0) -> Replay:
    """Forward and backward of a step, with `more` microbatches like the second one."""
    done = runs.longer
    phases = done.phases
    found = _priced(done, speed, config, REPLAYED)
    if runs.short is not None:
        group = len(done.blocks) - len(runs.short.blocks)
        first = len(done.blocks) // 2 // group * group
        found = deepened(found, phases, first, group, runs.times)
    if more:
        found, phases = _with_microbatches(found, phases, more)
    names = set(done.blocks)

    def name_of(event: Event) -> str:
        return "block" if enclosing(event.module, names) else event.module or "root"

    return replay(found, phases, name_of, on_cpu=speed.on_cpu)


def _with_microbatches(found: Sequence[Event], phases: Sequence[str], more: int) -> tuple[list[Event], list[str]]:
    """The events with `more` copies of the second of three microbatches after it, and the phases with the copies'."""
    # A phase begins where its number changes, so the copies need numbers of their own.
    starts = [n for n in sorted({event.phase for event in found}) if phases[n] == FORWARD]
    second = [event for event in found if starts[1] <= event.phase < starts[2]]
    end = next(i for i, event in enumerate(found) if event.phase >= starts[2])
    copies, every = list[Event](), list(phases)
    for _ in range(more):
        numbers = {number: len(every) + i for i, number in enumerate(sorted({event.phase for event in second}))}
        every += [every[number] for number in numbers]
        copies += [dataclasses.replace(event, phase=numbers[event.phase]) for event in second]
    return [*found[:end], *copies, *found[end:]], every


def _rest(done: Execution, speed: Speed, config: Config) -> float:
    """Seconds of clipping, optimizer and what the loop does after it, where nothing overlaps.

    With `--cpu-offload` these run on the CPU, whose memory is taken to be as fast as the link to it.
    """
    if config.cpu_offload:
        speed = dataclasses.replace(speed, memory=speed.host)
    found = _priced(done, speed, config, ("optimizer", "between"))
    return replay(found, done.phases, lambda event: "", on_cpu=speed.on_cpu).seconds


def _priced(done: Execution, speed: Speed, config: Config, names: Sequence[str]) -> list[Event]:
    """The events of the last step in these phases."""
    numbers = {name: number for number, name in enumerate(done.blocks)}
    block_of = cache(lambda module: numbers.get(enclosing(module, numbers)))
    there = done.last_step(names)
    return events(there, done.phases, block_of, lambda work: price(work, speed, config), speed)


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


def _forward_flops(config: Config, ranks: int, runs: Runs) -> int:
    """The FLOPs of a rank's forward passes in one step, as an MFU counts them."""

    def of(done: Execution) -> int:
        counts = Counter[int]()
        for work in done.last_step((FORWARD,)):
            counts[work.phase] += work.full
        each = list(counts.values())
        more = config.accumulation(ranks) - len(each)
        return sum(each) + (more * each[1] if more > 0 and len(each) > 1 else 0)

    return runs.whole(of)

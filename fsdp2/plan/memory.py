"""The most memory that a rank needs, by kind, phase and place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fsdp2.config import Config
from fsdp2.memory.ledger import KINDS, Allocation
from fsdp2.plan.depth import depths
from fsdp2.plan.execute import STEPS, Execution, execute
from fsdp2.plan.fake_ledger import LOSS

LOGITS = "logits and loss"
OFFLOADED = ("parameters", "gradients", "optimizer")  # by --cpu-offload, to the memory of the machine
ROUNDED = 512  # bytes: the CUDA allocator gives multiples of it; kMinBlockSize in c10/cuda/CUDACachingAllocator.h

Place = tuple[str, str]  # phase, and the module or its part of the model


@dataclass(frozen=True)
class Peak:
    """A moment at which a rank holds the most: in a whole run, or in one place of it."""

    phase: str
    module: str
    kinds: Mapping[str, int]
    rounding: int  # bytes by which an allocator of multiples of 512 bytes exceeds the tensors

    @property
    def bytes(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Memory:
    """What one rank needs.

    Attributes:
        peak: of the whole run. With `on_host`, without what `--cpu-offload` keeps in the machine's memory.
        evaluation: the most in evaluation.
        on_host: bytes of parameters, gradients and optimizer state in the machine's memory.
        largest_exchange: bytes of the largest collective.
        exchanged_bytes, exchanges: of the collectives of a step; of at most three microbatches.
        model_bytes, optimizer_bytes, average_bytes: of this rank's shards.
    """

    rank: int
    peak: Peak
    evaluation: Peak
    on_host: int
    largest_exchange: int
    exchanged_bytes: int
    exchanges: int
    model_bytes: int
    optimizer_bytes: int
    average_bytes: int


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


def run(config: Config, ranks: int, rank: int, *, gloo: bool) -> Runs:
    """Execute `config` as one rank of many, as `execute` does and raising what it raises."""
    there = depths(config)
    if there is None:
        return Runs(execute(config, ranks, rank, gloo=gloo), None, 0)
    whole, short, longer = there
    one, done = (execute(config, ranks, rank, count, gloo=gloo) for count in (short, longer))
    return Runs(done, one, (whole - longer) // (longer - short))


def plan_memory(config: Config, ranks: int, rank: int, *, offload_apart: bool = False) -> Memory:
    """What `config` needs as one rank of many. As `memory_of`, and raises what `run` does."""
    runs = run(config, ranks, rank, gloo=not offload_apart)
    return memory_of(config, rank, runs, offload_apart=offload_apart)


def memory_of(config: Config, rank: int, runs: Runs, *, offload_apart: bool = False) -> Memory:
    """What `config` needs as the rank that was executed.

    Args:
        offload_apart: there is a device beside the CPU, so `--cpu-offload` takes memory elsewhere.
    """
    apart = OFFLOADED if offload_apart and config.cpu_offload else ()
    one, done, times = runs.short, runs.longer, runs.times
    if one is None:
        found, sizes = peaks(done, apart), _sizes(done)
    else:
        first, second = peaks(one, apart), peaks(done, apart)
        found = {place: _grown(first[place], peak, times) for place, peak in second.items() if place in first}
        sizes = {name: size + times * (size - _sizes(one)[name]) for name, size in _sizes(done).items()}
    return Memory(
        rank,
        max(found.values(), key=_bytes),
        max((peak for peak in found.values() if peak.phase == "evaluation"), key=_bytes),
        2 * sizes["model_bytes"] + sizes["optimizer_bytes"] if apart else 0,
        max((exchange.bytes for exchange in done.timeline.collectives), default=0),
        **sizes,
    )


def _bytes(peak: Peak) -> int:
    return peak.bytes


def _sizes(done: Execution) -> dict[str, int]:
    sent = [exchange.bytes for exchange in done.timeline.collectives if exchange.step == STEPS]
    sizes = {name: getattr(done, name) for name in ("model_bytes", "optimizer_bytes", "average_bytes")}
    return {**sizes, "exchanged_bytes": sum(sent), "exchanges": len(sent)}


def _grown(first: Peak, second: Peak, times: int) -> Peak:
    """The peak in the same place of a model that has so many more groups of blocks than the second."""
    names = {**first.kinds, **second.kinds}

    def further(before: int, after: int) -> int:
        return after + times * (after - before)

    kinds = {name: further(first.kinds.get(name, 0), second.kinds.get(name, 0)) for name in names}
    return replace(second, kinds=kinds, rounding=further(first.rounding, second.rounding))


def peaks(done: Execution, apart: tuple[str, ...] = ()) -> dict[Place, Peak]:
    """The most of each place, in the last step and in evaluation.

    Places are numbered from the nearer end of the model, so that models of other depths have the same ones.

    Args:
        apart: kinds that are kept elsewhere.
    """
    line = done.timeline
    index = {name: number for number, name in enumerate(done.blocks)}
    found: dict[Place, tuple[int, dict[str, int], int, str]] = {}
    kinds = dict.fromkeys((*KINDS, LOGITS), 0)
    total = rounding = 0
    phases = iter([*line.phases, None])
    phase = following = next(phases)
    for when, change, allocation in line.changes():
        while following is not None and following.began <= when:
            phase, following = following, next(phases)
        kind = kind_of(allocation, done)
        if kind in apart:
            continue
        sign = 1 if change > 0 else -1
        total += change
        kinds[kind] += change
        rounding += sign * (-allocation.bytes % ROUNDED)
        assert phase is not None
        if change <= 0 or (phase.step < STEPS and phase.name != "evaluation"):
            continue
        place = (phase.name, _place(allocation.module, index))
        if place not in found or total > found[place][0]:
            found[place] = (total, dict(kinds), rounding, allocation.module)
    return {
        place: Peak(place[0], module, {kind: size for kind, size in sizes.items() if size}, extra)
        for place, (_, sizes, extra, module) in found.items()
    }


def kind_of(allocation: Allocation, done: Execution) -> str:
    """The ledger's kind, but that what the last layer and the loss make is told apart."""
    kind = allocation.kind or "temporary"
    return LOGITS if kind in ("activations", "temporary") and allocation.module in (LOSS, done.head) else kind


def _place(module: str, index: Mapping[str, int]) -> str:
    for name, number in index.items():
        if module == name or module.startswith(f"{name}."):
            nearer = number if number < len(index) / 2 else number - len(index)
            return f"{nearer}{module.removeprefix(name)}"
    return module

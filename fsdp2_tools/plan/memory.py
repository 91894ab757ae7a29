"""The most memory that a rank needs, by kind, phase and place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from fsdp2.config import Config
from fsdp2.run.process.settings import grows_segments
from fsdp2_extra.allocations.ledger import KINDS, Allocation
from fsdp2_extra.allocations.timeline import Timeline
from fsdp2_tools.plan.allocator import reserved
from fsdp2_tools.plan.depth import depths
from fsdp2_tools.plan.execute import STEPS, Execution, execute
from fsdp2_tools.plan.fake_ledger import LOSS
from fsdp2_tools.plan.saving import CHECKPOINT, FULL_MODEL, RESTORING, STARTING

LOGITS = "logits and loss"
OFFLOADED = ("parameters", "gradients", "optimizer")  # by --cpu-offload, to the memory of the machine
# Of saves and loads, in the memory of the machine as well, each with the name that saving.py gives its allocations.
ON_HOST = {"staged": "copies for saving", "objects": "plans of all ranks", "on its way": "between device and file"}
COMPUTATION = "computation"  # and the exchanges whose results are allocated on their own stream
STREAMS = (COMPUTATION, "all-gather", "reduce-scatter")

APART = ("evaluation", CHECKPOINT, FULL_MODEL, RESTORING, STARTING)  # phases that aren't training

Place = tuple[str, str]  # phase, and the module or its part of the model
Keep = Callable[[Allocation, str], bool]


@dataclass(frozen=True)
class Peak:
    """A moment at which a rank holds the most: in a whole run, or in one place of it."""

    phase: str
    module: str
    kinds: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Memory:
    """The memory of one rank.

    Attributes:
        peak: of the whole run; where there is a device, on it.
        reserved: bytes that a GPU's allocator holds at the end of the run; 0 without one.
        parts: the most in training, in evaluation, and while something is saved or loaded, each by its name.
        on_host: bytes in the memory of the machine that has the device: what is offloaded or copied to be saved.
        largest_exchange: bytes of the largest collective.
        exchanged_bytes, exchanges: of the collectives of a step; of at most three microbatches.
        model_bytes, optimizer_bytes, average_bytes: of this rank's shards.
    """

    rank: int
    peak: Peak
    reserved: int
    parts: Mapping[str, Peak]
    on_host: int
    largest_exchange: int
    exchanged_bytes: int
    exchanges: int
    model_bytes: int
    optimizer_bytes: int
    average_bytes: int

    @property
    def evaluation(self) -> Peak:
        return self.parts["evaluation"]


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


def memory_of(config: Config, rank: int, runs: Runs, *, offload_apart: bool = False) -> Memory:
    """Memory of `config` on the rank that was executed.

    Args:
        offload_apart: there is a device beside the CPU, so `--cpu-offload`, and what is copied to be saved, take memory
            elsewhere.
    """

    def elsewhere(allocation: Allocation, kind: str) -> bool:
        return offload_apart and (kind in ON_HOST.values() or (config.cpu_offload and kind in OFFLOADED))

    found = _whole(runs, lambda allocation, kind: not elsewhere(allocation, kind))
    on_host = _whole(runs, elsewhere).values()
    done, one = runs.longer, runs.short
    sizes = _sizes(done)
    if one is not None:
        sizes = {name: size + runs.times * (size - _sizes(one)[name]) for name, size in sizes.items()}
    parts: dict[str, Peak] = {}
    for peak in found.values():
        name = peak.phase if peak.phase in APART else "training"
        parts[name] = max(parts.get(name, peak), peak, key=_bytes)
    return Memory(
        rank,
        max(found.values(), key=_bytes),
        _reserved(runs, elsewhere) if offload_apart else 0,
        parts,
        max(map(_bytes, on_host), default=0),
        max((exchange.bytes for exchange in done.timeline.collectives if exchange.step <= STEPS), default=0),
        **sizes,
    )


def _whole(runs: Runs, keep: Keep) -> dict[Place, Peak]:
    """The peak of each place of the whole model."""
    found = peaks(runs.longer, keep)
    if runs.short is None:
        return found
    first = peaks(runs.short, keep)
    return {place: _grown(first[place], peak, runs.times) for place, peak in found.items() if place in first}


def _reserved(runs: Runs, elsewhere: Keep) -> int:
    """An allocator's memory: the peaks of its streams, and holes, which are those of the models that were executed.

    Holes grow with what a block makes and not with the number of equal blocks: a block fits into those of another.
    """

    def on(stream: str) -> Keep:
        return lambda allocation, kind: stream_of(allocation, kind) == stream and not elsewhere(allocation, kind)

    def highest(found: Mapping[Place, Peak]) -> int:
        return max(map(_bytes, found.values()), default=0)

    streams = sum(highest(_whole(runs, on(stream))) for stream in STREAMS)
    expandable = grows_segments(os.environ)
    holes = 0
    for done in filter(None, (runs.short, runs.longer)):
        there = sum(highest(peaks(done, on(stream))) for stream in STREAMS)
        holes = max(holes, reserved(_events(done, elsewhere), expandable=expandable) - there)
    return streams + holes


def _events(done: Execution, elsewhere: Keep) -> Iterator[tuple[int, int, str]]:
    for _, change, allocation in done.timeline.changes():
        kind = kind_of(allocation, done)
        if not elsewhere(allocation, kind):
            yield id(allocation), max(change, -1), stream_of(allocation, kind)


def stream_of(allocation: Allocation, kind: str) -> str:
    """Where FSDP2 allocates it: buffers of all-gathers, and what a reduce-scatter leaves, which is the gradients."""
    if kind == "gradients":
        return "reduce-scatter"
    return allocation.operation if allocation.operation in STREAMS else COMPUTATION


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
    return replace(second, kinds=kinds)


def peaks(done: Execution, keep: Keep) -> dict[Place, Peak]:
    """The most of each place, in the last step and what follows it, and while the weights to start from are loaded.

    Places are numbered from the nearer end of the model, so that models of other depths have the same ones.

    Args:
        keep: of an allocation and its kind, whether it counts.
    """
    lines = [done.timeline] if done.starting is None else [done.timeline, done.starting]
    return {place: peak for line in lines for place, peak in _peaks(line, done, keep).items()}


def _peaks(line: Timeline, done: Execution, keep: Keep) -> dict[Place, Peak]:
    index = {name: number for number, name in enumerate(done.blocks)}
    found: dict[Place, tuple[int, dict[str, int], str]] = {}
    kinds = dict.fromkeys((*KINDS, LOGITS, *ON_HOST.values()), 0)
    total = 0
    phases = iter([*line.phases, None])
    phase = following = next(phases)
    for when, change, allocation in line.changes():
        while following is not None and following.began <= when:
            phase, following = following, next(phases)
        kind = kind_of(allocation, done)
        if not keep(allocation, kind):
            continue
        total += change
        kinds[kind] += change
        assert phase is not None
        if change <= 0 or phase.step < STEPS:
            continue
        place = (phase.name, _place(allocation.module, index))
        if place not in found or total > found[place][0]:
            found[place] = (total, dict(kinds), allocation.module)
    return {
        place: Peak(place[0], module, {kind: size for kind, size in sizes.items() if size})
        for place, (_, sizes, module) in found.items()
    }


def kind_of(allocation: Allocation, done: Execution) -> str:
    """The ledger's kind, but that what the last layer and the loss make is told apart, and what a save copies."""
    if allocation.operation in ON_HOST:
        return ON_HOST[allocation.operation]
    kind = allocation.kind or "temporary"
    return LOGITS if kind in ("activations", "temporary") and allocation.module in (LOSS, done.head) else kind


def _place(module: str, index: Mapping[str, int]) -> str:
    for name, number in index.items():
        if module == name or module.startswith(f"{name}."):
            nearer = number if number < len(index) / 2 else number - len(index)
            return f"{nearer}{module.removeprefix(name)}"
    return module

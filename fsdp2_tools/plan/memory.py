"""The memory of a rank: its peaks, and what an allocator reserves for them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from fsdp2.config import Config
from fsdp2.run.process.settings import grows_segments
from fsdp2_extra.allocations.ledger import Allocation
from fsdp2_tools.plan.allocator import reserved
from fsdp2_tools.plan.execute import STEPS, Execution, Runs
from fsdp2_tools.plan.peaks import ON_HOST, Keep, Peak, Place, kind_of, peaks, whole_peaks
from fsdp2_tools.plan.saving import CHECKPOINT, FULL_MODEL, RESTORING, STARTING

OFFLOADED = ("parameters", "gradients", "optimizer")  # by --cpu-offload, to the memory of the machine
COMPUTATION = "computation"  # and the exchanges whose results are allocated on their own stream
STREAMS = (COMPUTATION, "all-gather", "reduce-scatter")
APART = ("evaluation", CHECKPOINT, FULL_MODEL, RESTORING, STARTING)  # phases that aren't training


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
        model_bytes, optimizer_bytes, average_bytes: of this rank's shards; saved_bytes, what of the model is saved.
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
    saved_bytes: int
    optimizer_bytes: int
    average_bytes: int

    @property
    def evaluation(self) -> Peak:
        return self.parts["evaluation"]


def memory_of(config: Config, rank: int, runs: Runs, *, offload_apart: bool = False) -> Memory:
    """Memory of `config` on the rank that was executed.

    Args:
        offload_apart: there is a device beside the CPU, so `--cpu-offload`, and what is copied to be saved, take memory
            elsewhere.
    """

    def elsewhere(allocation: Allocation, kind: str) -> bool:
        return offload_apart and (kind in ON_HOST.values() or (config.cpu_offload and kind in OFFLOADED))

    found = whole_peaks(runs, lambda allocation, kind: not elsewhere(allocation, kind))
    exchanges = [exchange for exchange in runs.longer.timeline.collectives if exchange.step <= STEPS]
    parts: dict[str, Peak] = {}
    for peak in found.values():
        name = peak.phase if peak.phase in APART else "training"
        parts[name] = max(parts.get(name, peak), peak, key=attrgetter("bytes"))
    return Memory(
        rank=rank,
        peak=max(found.values(), key=attrgetter("bytes")),
        reserved=_reserved(runs, elsewhere) if offload_apart else 0,
        parts=parts,
        on_host=_highest(whole_peaks(runs, elsewhere)),
        largest_exchange=max((exchange.bytes for exchange in exchanges), default=0),
        exchanged_bytes=runs.whole(lambda done: sum(_exchanged(done))),
        exchanges=runs.whole(lambda done: len(_exchanged(done))),
        model_bytes=runs.whole(lambda done: done.model_bytes),
        saved_bytes=runs.whole(lambda done: done.saved_bytes),
        optimizer_bytes=runs.whole(lambda done: done.optimizer_bytes),
        average_bytes=runs.whole(lambda done: done.average_bytes),
    )


def _exchanged(done: Execution) -> list[int]:
    """Bytes of the collectives of a step."""
    return [exchange.bytes for exchange in done.timeline.collectives if exchange.step == STEPS]


def _reserved(runs: Runs, elsewhere: Keep) -> int:
    """An allocator's memory: the peaks of its streams, and holes, which are those of the models that were executed.

    Holes grow with what a block makes and not with the number of equal blocks: a block fits into those of another.
    """

    def on(stream: str) -> Keep:
        return lambda allocation, kind: stream_of(allocation, kind) == stream and not elsewhere(allocation, kind)

    streams = sum(_highest(whole_peaks(runs, on(stream))) for stream in STREAMS)
    expandable = grows_segments(os.environ)
    holes = 0
    for done in filter(None, (runs.short, runs.longer)):
        there = sum(_highest(peaks(done, on(stream))) for stream in STREAMS)
        holes = max(holes, reserved(_events(done, elsewhere), expandable=expandable) - there)
    return streams + holes


def _events(done: Execution, elsewhere: Keep) -> Iterator[tuple[int, int, str]]:
    for _, change, allocation in done.timeline.changes():
        kind = kind_of(allocation, done)
        if not elsewhere(allocation, kind):
            yield id(allocation), max(change, -1), stream_of(allocation, kind)


def stream_of(allocation: Allocation, kind: str) -> str:
    """The stream on which FSDP2 allocates it: buffers of all-gathers, and gradients, which a reduce-scatter leaves."""
    if kind == "gradients":
        return "reduce-scatter"
    return allocation.operation if allocation.operation in STREAMS else COMPUTATION


def _highest(found: Mapping[Place, Peak]) -> int:
    return max((peak.bytes for peak in found.values()), default=0)

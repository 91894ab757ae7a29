"""The most memory of each place of a model in each phase, by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fsdp2_extra.allocations.ledger import KINDS, Allocation, enclosing
from fsdp2_extra.allocations.timeline import Timeline
from fsdp2_tools.plan.execute import STEPS, Execution, Runs
from fsdp2_tools.plan.fake_ledger import LOSS

LOGITS = "logits and loss"
# Of saves and loads, in the memory of the machine as well, each with the name that saving.py gives its allocations.
ON_HOST = {"staged": "copies for saving", "objects": "plans of all ranks", "on its way": "between device and file"}

Place = tuple[str, str]  # phase, and the module or its part of the model
Keep = Callable[[Allocation, str], bool]  # of an allocation and its kind, whether it counts


@dataclass(frozen=True)
class Peak:
    """A moment at which a rank holds the most: in a whole run, or in one place of it."""

    phase: str
    module: str
    kinds: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.kinds.values())


def whole_peaks(runs: Runs, keep: Keep) -> dict[Place, Peak]:
    """`peaks` of the whole model."""
    found = peaks(runs.longer, keep)
    if runs.short is None:
        return found
    grown = {}
    for place, first in peaks(runs.short, keep).items():
        if (peak := found.get(place)) is not None:
            before, after = first.kinds, peak.kinds
            kinds = {kind: runs.further(before.get(kind, 0), after.get(kind, 0)) for kind in {**before, **after}}
            grown[place] = replace(peak, kinds=kinds)
    return grown


def peaks(done: Execution, keep: Keep) -> dict[Place, Peak]:
    """The most of each place, in the last step and what follows it, and while the weights to start from are loaded.

    Places are numbered from the nearer end of the model, so that models of other depths have the same ones.
    """
    lines = [done.timeline] if done.starting is None else [done.timeline, done.starting]
    return {place: peak for line in lines for place, peak in _peaks(line, done, keep).items()}


def _peaks(line: Timeline, done: Execution, keep: Keep) -> dict[Place, Peak]:
    index = {name: number for number, name in enumerate(done.blocks)}
    found: dict[Place, Peak] = {}
    most: dict[Place, int] = {}
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
        if total > most.get(place, -1):
            most[place] = total
            found[place] = Peak(phase.name, allocation.module, {kind: size for kind, size in kinds.items() if size})
    return found


def kind_of(allocation: Allocation, done: Execution) -> str:
    """The ledger's kind, but that what the last layer and the loss make is told apart, and what a save copies."""
    if allocation.operation in ON_HOST:
        return ON_HOST[allocation.operation]
    kind = allocation.kind or "temporary"
    return LOGITS if kind in ("activations", "temporary") and allocation.module in (LOSS, done.head) else kind


def _place(module: str, index: Mapping[str, int]) -> str:
    block = enclosing(module, index)
    if not block:
        return module
    number = index[block]
    nearer = number if number < len(index) / 2 else number - len(index)
    return f"{nearer}{module.removeprefix(block)}"

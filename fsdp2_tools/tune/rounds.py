"""Successive halving over settings, measured beside the default (https://arxiv.org/abs/1502.07943).

A machine's speed drifts, so times of different moments are never compared: what counts is the ratio to the default's
step that was taken just before or after.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp2.config import Config
from fsdp2.units import size

LAST_STEPS = 24  # of the best and of the default, in the last round
LAST_PAIRS = 6  # of launches, where they can't share one: the fewest whose smallest and largest hold a median at 95 %
CONFIDENCE = 0.95
# Where orders of summation differ, the losses of the first steps do by their rounding: relative, by compute dtype.
ROUNDING = {None: 1e-5, "bf16": 5e-3, "fp16": 5e-3}


@dataclass(eq=False)
class Candidate:
    """A setting and what was measured of it.

    Attributes:
        changes: fields of Config and their values, in which it differs from the default.
        planned_bytes, planned_ms: what the plan says of its tensors and its step; None if there is no plan, or no time.
        failed: why it is out.
        losses: of the first steps.
        step_ms: of the timed steps; each is that of the slowest rank.
        ratios: the same as parts of the default's steps beside them; below 1 is faster.
        last: the ratios of the last round alone, on which the verdict rests.
        samples: of a step, over all ranks.
        peak_bytes: of the fullest rank's tensors.
    """

    name: str
    config: Config
    changes: dict[str, Any] = field(default_factory=dict)
    planned_bytes: int | None = None
    planned_ms: float | None = None
    failed: str | None = None
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    samples: int = 0
    peak_bytes: int = 0

    @property
    def score(self) -> tuple[float, float]:
        """Less is faster. Without a default that runs there is no ratio, and the time decides."""
        return tuple(statistics.median(values) if values else math.inf for values in (self.ratios, self.step_ms))  # type: ignore[return-value]

    def milliseconds(self, default: Candidate) -> float | None:
        """Of a step, as if all settings had been measured at one time: the default's, by how much this one differs."""
        if self.ratios and default.step_ms:
            return statistics.median(default.step_ms) * statistics.median(self.ratios)
        return statistics.median(self.step_ms) if self.step_ms else None


Record = dict[str, Any]  # of one candidate: losses, step_ms, samples, peak_bytes
# Measures candidates, with so many timed steps each; None for one that failed, which then says why.
Measure = Callable[[Sequence[Candidate], int], Sequence[Record | None]]


def halve(
    default: Candidate,
    others: Sequence[Candidate],
    measure: Measure,
    *,
    steps: int,
    together: bool = True,
    budget: int | None = None,
    time_left: Callable[[], bool] = lambda: True,
    more: Callable[[], Sequence[Candidate]] = tuple,
    say: Callable[[str], None] = print,
) -> Candidate:
    """Measure in rounds, the better half going on, until one is left; then that one and the default once more.

    The last round decides alone: the best of many is also the luckiest, and its earlier figures flatter it.

    Args:
        steps: timed steps of a candidate in a round.
        together: those of a round take their steps in turn, so each step has the default's beside it.
        budget: bytes that a rank's tensors may take.
        time_left: False ends the rounds after the one that runs, but each setting is measured once; the last is
            measured all the same.
        more: further settings for the second round, asked for when the first has been measured.

    Returns the challenger, or the default if nothing else is left.
    """
    alive, number, fresh = [default, *others], 0, list(others)
    while len(alive) > 2 and (fresh or time_left()):
        number += 1
        say(f"round {number}: {len(alive)} settings")
        _round(default, alive, measure, steps)
        judge(default, alive, budget)
        others = sorted((one for one in alive if one is not default and one.failed is None), key=lambda one: one.score)
        alive = [default, *others[: max(1, len(others) // 2)]]  # the faster half
        fresh = list(more()) if number == 1 and time_left() else []
        alive += fresh
    rivals = [one for one in alive if one is not default and one.failed is None]
    if not rivals:
        return default
    best = min(rivals, key=lambda one: one.score)
    say(f"the last round: {best.name}, and the default")
    for launch in range(1 if together else LAST_PAIRS):
        pair = [default, best] if launch % 2 == 0 else [best, default]
        best.last += _round(default, pair, measure, LAST_STEPS if together else steps, whole=not together)
    judge(default, [default, best], budget)
    return best if best.failed is None else default


def _round(
    default: Candidate, candidates: Sequence[Candidate], measure: Measure, steps: int, *, whole: bool = False
) -> list[float]:
    """Measure, and note what was found. Returns the last candidate's ratios to the default, `whole` for one of all."""
    records = dict(zip(candidates, measure(candidates, steps), strict=True))
    beside = (records[default] or {}).get("step_ms")
    ratios: list[float] = []
    for one, record in records.items():
        if record is None:
            continue
        one.losses, one.samples = record["losses"], record["samples"]
        one.peak_bytes = max(one.peak_bytes, record["peak_bytes"])
        one.step_ms += record["step_ms"]
        if beside is None:
            continue
        found = [own / other for own, other in zip(record["step_ms"], beside, strict=True)]
        if whole:
            found = [statistics.median(record["step_ms"]) / statistics.median(beside)]
        one.ratios += found
        ratios = ratios if one is default else found
    return ratios


def judge(default: Candidate, candidates: Sequence[Candidate], budget: int | None) -> None:
    """Put those out that take more memory than there is, or that train differently."""
    reference = default if default.losses else next((one for one in candidates if one.losses), default)
    for one in candidates:
        if one.failed is not None or not one.losses:
            continue
        if budget is not None and one.peak_bytes > budget:
            one.failed = f"takes {size(one.peak_bytes)} of tensors, and a rank may use {size(budget)}"
        elif (off := deviation(one, reference)) > ROUNDING[one.config.mixed_precision]:
            one.failed = f"trains differently: its losses are off by {off:.1e}"


def deviation(one: Candidate, reference: Candidate) -> float:
    """The largest relative difference between the losses of two settings' first steps; 0 if all bits are equal."""
    pairs = list(zip(one.losses, reference.losses, strict=False))
    if any(math.isnan(loss) for pair in pairs for loss in pair):
        return math.inf
    return max((abs(a - b) / max(abs(b), 1e-30) for a, b in pairs), default=math.inf)


def interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """The interval in which the median of what these were drawn from lies with 95 % confidence; None of too few.

    By order statistics, so without assuming a distribution: as many of so many coins may show heads.
    """
    count, ordered = len(ratios), sorted(ratios)
    left_out, tail = -1, 0.0
    while (tail := tail + math.comb(count, left_out + 1) / 2**count) <= (1 - CONFIDENCE) / 2:
        left_out += 1
    return None if left_out < 0 else (ordered[left_out], ordered[count - 1 - left_out])


def is_faster(best: Candidate, default: Candidate) -> bool:
    """True if the challenger beats the default by more than noise. A default that failed is beaten by what runs."""
    if best is default or best.failed is not None:
        return False
    if default.failed is not None:
        return True
    found = interval(best.last)
    return found is not None and found[1] < 1

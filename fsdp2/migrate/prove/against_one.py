"""One program on one rank and on several, at the same global batch: what is silently wrong on several.

A pure function of the two records. What leads to something else is named alone: ranks that start from different weights
have other gradients too, which says nothing more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fsdp2.migrate.prove.compare import FIRST, LATER, LEFT, apart
from fsdp2.migrate.prove.fingerprint import SKETCHES, total
from fsdp2.migrate.prove.record import Record


@dataclass(frozen=True)
class Fault:
    """`kind` is a word for programs that read it, `text` what is wrong, where and since which step."""

    kind: str
    text: str


def faults(one: Record, several: Record) -> list[Fault]:
    """None if both train alike, to rounding."""
    found: list[Fault] = []
    rules = GROUPS if same_batch(one, several) else GROUPS[:ALONE]
    for group in rules:
        found += [fault for rule in group for fault in rule(one, several)]
        if found:
            break
    return found


def same_batch(one: Record, several: Record, times: int = 1) -> bool:
    """Whether all ranks get as many samples in each step as one rank alone, or `times` as many."""
    counts = [
        [(one.samples(by, step).total(), several.samples(by, step).total()) for step in _steps(one, several)]
        for by in _sources(one, several)
    ]
    return any(all(alone * times == together > 0 for alone, together in each) for each in counts)


def _sources(one: Record, several: Record) -> list[str]:
    return [by for by in one.sources if by in several.sources]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _unset(one: Record, several: Record) -> Iterator[Fault]:
    for record in (several, one):
        if names := list(dict.fromkeys(record.facts()["unset"])):
            yield Fault("never-set", f"never set after to_empty() on {len(record.ranks)} ranks: {_some(names)}")
            return


def _weights(one: Record, several: Record) -> Iterator[Fault]:
    if differ := several.apart(1, "before"):
        name, (first, second) = next(iter(differ.items()))
        yield Fault("different-weights", f"ranks {first} and {second} start from different weights: {_some([*differ])}")
        return
    start = one.parts(0, 1, "before")
    for rank in range(len(several.ranks)):
        held = several.parts(rank, 1, "before")
        names = [
            name
            for name, parts in held.items()
            if any(
                place in start.get(name, {}) and start[name][place].hash != part.hash for place, part in parts.items()
            )
        ]
        if names:
            text = f"rank {rank} starts from other weights than one rank does alone: {_some(names)}"
            yield Fault("different-weights", text)
            return


def _left(one: Record, several: Record) -> Iterator[Fault]:
    if any(event["left"] for event in several.of(0, "zero")):
        yield Fault("kept-gradients", LEFT)


def _unheld(one: Record, several: Record) -> Iterator[Fault]:
    if not any(event["holds"] for event in several.of(0, "settings")):
        text = "the optimizer holds none of the model's parameters: it was made before they were sharded, or of another model"
        yield Fault("not-in-the-optimizer", text)


def _same_data(one: Record, several: Record) -> Iterator[Fault]:
    for by in several.sources[:1]:
        for rank in range(1, len(several.ranks)):
            pairs = [(several.samples(by, step, 0), several.samples(by, step, rank)) for step in _steps(one, several)]
            if all(a and a == b for a, b in pairs):
                yield Fault("same-data", f"ranks 0 and {rank} get the same samples in each step")
                return


def _samples(one: Record, several: Record) -> Iterator[Fault]:
    steps, by = _steps(one, several), _sources(one, several)
    if any(all(one.samples(each, step) == several.samples(each, step) for step in steps) for each in by):
        return
    alone = sum((one.samples(by[0], step) for step in steps), Counter())
    together = sum((several.samples(by[0], step) for step in steps), Counter())
    dropped, more = (alone - together).total(), together - alone
    again = sum(count for sample, count in more.items() if sample in alone)
    if not alone & together:
        yield Fault(
            "other-data", "no sample that the ranks get is one that one rank gets: other data, or another order"
        )
    elif dropped or again:
        text = f"of the {alone.total()} samples that one rank gets in these steps {dropped} reach no rank, {again} are repeated"
        yield Fault("repeated-samples" if again >= dropped else "dropped-samples", text)
    else:
        yield Fault("other-order", "the samples are those of one rank, but in other steps")


def _settings(one: Record, several: Record) -> Iterator[Fault]:
    for step in _steps(one, several):
        for a, b in zip(one.of(0, "settings", step), several.of(0, "settings", step), strict=False):
            for number, (x, y) in enumerate(zip(a["groups"], b["groups"], strict=False)):
                for key in sorted(x.keys() & y.keys()):
                    if x[key] != y[key]:
                        text = f"step {step}: {key} of group {number} is {y[key]} on {len(several.ranks)} ranks, {x[key]} on one"
                        yield Fault("settings", text)
                        return


def _drift(one: Record, several: Record) -> Iterator[Fault]:
    for step in _steps(one, several):
        if names := several.apart(step, "after"):
            name, ranks = next(iter(names.items()))
            why = "their gradients differ, so nothing averages them"
            if several.facts()["apart"]:
                why = "HYBRID_SHARD of FSDP1 with shards of one rank never synchronises its replicas"
            elif not several.apart(step, "gradient"):
                why = "their gradients are equal, their updates aren't"
            text = (
                f"step {step}: replicas drift: {_some([*names])} differs between ranks {ranks[0]} and {ranks[1]}; {why}"
            )
            yield Fault("drift", text)
            return


def _norms(one: Record, several: Record) -> Iterator[Fault]:
    for step in _steps(one, several):
        norms = several.norms(step)
        if len(set(norms)) > 1:
            text = f"step {step}: the ranks clip by different norms, {', '.join(f'{norm:.6g}' for norm in norms)}"
            yield Fault("norm-of-shards", f"{text}: each is of what one rank holds")
            return


def _gradients(one: Record, several: Record) -> Iterator[Fault]:
    """Of the first step, where the weights are still the same."""
    low = one.facts()["low"] or several.facts()["low"]
    when = "unclipped" if one.parts(0, 1, "unclipped") and several.parts(0, 1, "unclipped") else "gradient"
    yield from _compare_gradients(one, several, when, FIRST[low])
    if when == "unclipped":
        yield from _compare_gradients(one, several, "gradient", FIRST[low])


def _compare_gradients(one: Record, several: Record, when: str, tolerance: float) -> Iterator[Fault]:
    alone, ranks = one.parts(0, 1, when), range(len(several.ranks))
    whole, ours = total(one.whole(1, when).values()), total(several.whole(1, when).values())
    ratios: list[tuple[float, float]] = []  # of each rank's shards: the factor, and how far from it
    for rank in ranks:
        held = several.parts(rank, 1, when)
        pairs = [
            (part, alone[name][place])
            for name, parts in held.items()
            for place, part in parts.items()
            if place in alone.get(name, {})
        ]
        got, expected = total(part for part, _ in pairs), total(part for _, part in pairs)
        if expected.norm > 1e-3 * whole.norm:
            factor = got.norm / expected.norm
            off = total(part for part, _ in pairs).distance(expected, factor) / (got.norm or 1.0)
            ratios.append((factor, off))
    overall = ours.norm / whole.norm if whole.norm else 1.0
    off = ours.distance(whole, overall) / (ours.norm or 1.0)
    if off <= tolerance and abs(overall - 1) <= tolerance:
        return
    if off <= 10 * tolerance:
        yield Fault("factor", f"step 1: gradients are {overall:.6g} times those of one rank")
    elif ratios and all(distance <= 10 * tolerance for _, distance in ratios):
        each = ", ".join(f"{factor:.6g}" for factor, _ in ratios)
        yield Fault(
            "norm-of-shards",
            f"step 1: each rank's shards of the gradients have a factor of their own, {each}: clipped by a norm of one rank's shards",
        )
    else:
        losses = [math.fsum(several.losses(rank, 1)) for rank in ranks]
        mean, expected = math.fsum(losses) / len(losses), math.fsum(one.losses(0, 1))
        why = ""
        if apart(mean, expected) > tolerance:
            why = f"; the mean of the ranks' losses is {mean:.6g}, that of all samples {expected:.6g}: ranks count alike, whatever they hold"
        yield Fault("gradients", f"step 1: gradients differ from those of one rank by {off:.1e} of their norm{why}")


def _updates(one: Record, several: Record) -> Iterator[Fault]:
    """Of the first step: what was added to each tensor, whose sketch is the difference of two."""
    before, alone, together = one.whole(1, "before"), one.whole(1, "after"), several.whole(1, "after")
    gradients = one.whole(1, "gradient")
    size = total(gradients.values()).norm
    found = []
    for name in before.keys() & together.keys() & gradients.keys():
        change = math.sqrt(
            sum((a - b) ** 2 for a, b in zip(alone[name].sketch, before[name].sketch, strict=True)) / SKETCHES
        )
        off = together[name].distance(alone[name])
        # Of a gradient that is 0 but for rounding Adam makes anything.
        if gradients[name].norm > 1e-4 * size and off > 0.05 * change + 1e-6 * before[name].norm:
            found.append(name)
    if found:
        yield Fault(
            "updates",
            f"step 1: the optimizer changes {_some(sorted(found))} otherwise, with equal gradients: it may use a norm or mean of one rank's shard",
        )


def _losses(one: Record, several: Record) -> Iterator[Fault]:
    low = one.facts()["low"] or several.facts()["low"]
    ranks = range(len(several.ranks))
    for step in _steps(one, several):
        mean = math.fsum(math.fsum(several.losses(rank, step)) for rank in ranks) / len(ranks)
        off = apart(mean, math.fsum(one.losses(0, step)))
        if off > LATER[low]:
            yield Fault("losses", f"step {step}: the mean of the ranks' losses is {off:.1e} from one rank's")
            return


def _buffers(one: Record, several: Record) -> Iterator[Fault]:
    last = min(one.steps, several.steps)
    first = several.parts(0, last, "after", "buffers")
    for rank in range(1, len(several.ranks)):
        held = several.parts(rank, last, "after", "buffers")
        names = [
            name
            for name, parts in held.items()
            if {p: x.hash for p, x in parts.items()} != {p: x.hash for p, x in first.get(name, {}).items()}
        ]
        if names:
            yield Fault(
                "buffers",
                f"buffers differ between ranks 0 and {rank}: {_some(names)}, as of batch norm without SyncBatchNorm",
            )
            return


def _steps(one: Record, several: Record) -> range:
    return range(1, min(one.steps, several.steps) + 1)


Rule = Callable[[Record, Record], Iterator[Fault]]
# Each group only where the ones before it found nothing.
GROUPS: list[list[Rule]] = [
    [_unset, _weights, _same_data, _settings, _left],
    [_drift, _norms, _unheld, _buffers],
    [_samples],
    [_gradients],
    [_updates, _losses],
]
ALONE = 2  # groups that say something where the global batch isn't the same

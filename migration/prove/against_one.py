"""One program on one rank and on several, at the same global batch: what is silently wrong on several.

A pure function of the two records. What leads to something else is named alone: ranks that start from different weights
have other gradients too, which says nothing more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from migration.prove.compare import FIRST, LATER, LEFT, apart
from migration.prove.fingerprint import Print, total
from migration.prove.habits import HABITS, NOTES, UNSYNCHRONISED, Named, Rule
from migration.prove.record import Place, Record, some


@dataclass(frozen=True)
class Fault:
    """`kind` is a word for programs that read it, `text` what is wrong, where and since which step."""

    kind: str
    text: str


class Incomparable(RuntimeError):
    """Nothing is wrong as far as can be seen, and the rest can't be compared. The message says why."""


def faults(one: Record, several: Record) -> list[Fault]:
    """None if both train alike, to rounding. Raises Incomparable."""
    alike = _alike(one, several)
    for rules in GROUPS if alike else GROUPS[:ALONE]:
        if found := [Fault(*named) for rule in rules if (named := rule(one, several))]:
            return found
    if not alike:
        why = "write each per-rank number in ARGS as its total in braces, such as --batch-size {64}"
        if any(len(one.samples(by, 1)) == len(several.samples(by, 1)) for by in one.sources):
            why = "each rank takes samples of its own, of its part of the data or by a seed of its rank: one rank can't"
        raise Incomparable(f"in the first step all ranks together get other samples than one rank does; {why}")
    return []


def notes(one: Record, several: Record) -> list[Fault]:
    """Name what is no fault and yet nobody's intention."""
    return [Fault(*named) for rule in NOTES if (named := rule(one, several))]


def scales(one: Record, several: Record) -> dict[str, tuple[float, float]]:
    """Of each parameter how many times as large as one rank's its gradient is in the first step, and how far from
    exactly that, in units of its norm; empty where ranks start from other weights or get other samples."""
    if not _alike(one, several) or _weights(one, several):
        return {}
    when = next(when for when in ("unclipped", "gradient") if one.parts(0, 1, when))
    alone, together = one.whole(1, when), several.whole(1, when)
    return {name: _factor(together[name], alone[name]) for name in alone if name in together}


def larger(one: Record, several: Record) -> float:
    """The samples of all ranks by those of one, in the first step in which a loader gives any."""
    for step in _steps(one, several):
        if one.samples("loader", step):
            counts = [[len(record.samples(by, step)) for record in (several, one)] for by in one.sources[:2]]
            return min(together / alone for together, alone in counts if alone)
    return 1.0


def _steps(one: Record, several: Record) -> range:
    return range(1, min(one.steps, several.steps) + 1)


def _alike(one: Record, several: Record) -> range:
    """The first steps, as far as all ranks together get one rank's samples, by any account of them."""
    steps = _steps(one, several)
    for step in steps:
        if not any(_same_samples(one, several, by, step) for by in one.sources):
            return range(1, step)
    return steps


def _same_samples(one: Record, several: Record, by: str, step: int) -> bool:
    """But for padding, which depends on what else is in a batch."""

    def within(some: Record, other: Record) -> bool:
        known = {*other.samples(by, step), *other.samples(by, step, rows="trimmed")}
        pairs = zip(some.samples(by, step), some.samples(by, step, rows="trimmed"), strict=True)
        return all(row in known or trimmed in known for row, trimmed in pairs)

    alone, together = one.samples(by, step), several.samples(by, step)
    if sorted(alone) == sorted(together):
        return True
    return len(alone) == len(together) and within(one, several) and within(several, one)


def _random(one: Record, several: Record, step: int) -> str | None:
    """List further differences between one rank and several, which may be meant."""
    if several.facts()["draws"]:
        return "the program draws random numbers before backward, others on each rank"
    if not any(_same_samples(one, several, by, step) for by in ("model", "loader")):
        return "the values of samples differ, as by noise or augmentation that each rank draws"
    return None


def _tolerance(one: Record, several: Record, of: dict[bool, float]) -> float:
    return of[one.facts()["low"] or several.facts()["low"]]


def _loss(record: Record, step: int) -> float:
    """The mean of the ranks', of what each passes to backward() in the step."""
    losses = [loss for rank in record.readers for loss in record.losses(rank, step)]
    return math.fsum(losses) / len(record.readers)


def _unset(one: Record, several: Record) -> Named:
    names = several.facts()["unset"]
    return ("never-set", f"never set after to_empty(): {some(names)}") if names else None


def _weights(one: Record, several: Record) -> Named:
    if differ := several.apart(1, "before"):
        first, second = next(iter(differ.values()))
        return "different-weights", f"ranks {first} and {second} start from different weights: {some(differ)}"
    start = one.parts(0, 1, "before")
    for rank in range(len(several.ranks)):
        held = several.parts(rank, 1, "before")
        if names := [name for name, parts in held.items() if _differ(parts, start.get(name, {}))]:
            return "different-weights", f"rank {rank} starts from other weights than one rank alone: {some(names)}"
    return None


def _differ(parts: dict[Place, Print], others: dict[Place, Print]) -> bool:
    return any(others[at].hash != part.hash for at, part in parts.items() if at in others)


def _same_data(one: Record, several: Record) -> Named:
    for rank in several.readers[1:]:
        if several.sources and _equal_samples(several, several.sources[0], rank):
            return "same-data", f"ranks 0 and {rank} get the same samples in each step"
    return None


def _equal_samples(several: Record, by: str, rank: int) -> bool:
    pairs = [[sorted(several.samples(by, step, each)) for each in (0, rank)] for step in range(1, several.steps + 1)]
    return any(ours for ours, _ in pairs) and all(ours == theirs for ours, theirs in pairs)


def _settings(one: Record, several: Record) -> Named:
    for step in _steps(one, several):
        first = one.of(0, "settings", step)
        for rank in range(len(several.ranks)):
            for a, b in zip(first, several.of(rank, "settings", step), strict=False):
                for number, (x, y) in enumerate(zip(a["groups"], b["groups"], strict=False)):
                    if keys := [key for key in sorted(x.keys() & y.keys()) if x[key] != y[key]]:
                        what, where = f"{keys[0]} of group {number}", f"rank {rank} of {len(several.ranks)}"
                        return "settings", f"step {step}: {what} is {y[keys[0]]} on {where}, {x[keys[0]]} on one alone"
    return None


def _left(one: Record, several: Record) -> Named:
    return ("kept-gradients", LEFT) if any(event["left"] for event in several.of(0, "zero")) else None


def _drift(one: Record, several: Record) -> Named:
    for step in _steps(one, several):
        if names := several.apart(step, "after"):
            first, second = next(iter(names.values()))
            why = "their gradients differ, so nothing averages them"
            if several.facts()["apart"]:
                why = "HYBRID_SHARD of FSDP1 with shards of one rank never synchronises its replicas"
            elif not several.apart(step, "gradient"):
                why = "their gradients are equal, their updates aren't"
            return "drift", f"step {step}: replicas drift: {some(names)} on ranks {first} and {second}; {why}"
    return None


def _norms(one: Record, several: Record) -> Named:
    for step in _steps(one, several):
        norms = several.norms(step)
        if len(set(norms)) > 1:
            text = f"step {step}: the ranks clip by different norms, each of what it holds: "
            return "norm-of-shards", text + ", ".join(f"{norm:.6g}" for norm in norms)
    return None


def _unheld(one: Record, several: Record) -> Named:
    if any(event["holds"] for event in several.of(0, "settings")):
        return None
    return "not-in-the-optimizer", "the optimizer holds none of the model's parameters: was it made before sharding?"


def _buffers(one: Record, several: Record) -> Named:
    last = _steps(one, several)[-1]
    first, *others = (several.parts(rank, last, "after", "buffers") for rank in range(len(several.ranks)))
    for rank, held in enumerate(others, 1):
        if names := [name for name in held if held[name] != first[name]]:
            return (
                "buffers",
                f"buffers differ between ranks 0 and {rank}: {some(names)}; for batch norm: SyncBatchNorm",
            )
    return None


def _samples(one: Record, several: Record) -> Named:
    """State the facts about samples that hold in any order: of a loader's epoch, or of samples that no model gets."""
    steps, ranks = _steps(one, several), len(several.readers)
    by = next((by for by in ("index", "loader", "model") if by in several.sources), None)
    # The parts of one batch, or of one sample, may be on several ranks.
    if (
        by is None
        or _alike(one, several) == steps
        or any(_equal_samples(several, by, rank) for rank in several.readers[1:])
    ):
        return None
    if all(_again(several, by, step) and not _again(one, by, step) for step in steps):
        return "repeated-samples", "in each step some samples are on several ranks"
    if by == "model":  # which may be drawn at random, with replacement
        return None
    once, used, given, got = (
        sum(len(record.samples(by, step)) for step in steps) for record in (one, several) for by in ("loader", "model")
    )
    if once == used and 0 < got < given:
        return "dropped-samples", f"of {given} samples that the ranks' loaders give {given - got} reach no model"
    (alone, ended), (together, all_ended) = one.epoch(by), several.epoch(by)
    batch = max(len(several.samples(by, step)) for step in steps)
    again, missing = together.total() - len(together), (alone - together).total()
    if alone.total() == len(alone) and again >= ranks:  # fewer make the ranks' numbers equal
        return "repeated-samples", f"in the first epoch {again} of {together.total()} samples come again"
    if ended and all_ended and missing >= batch + ranks:  # fewer than a batch end an epoch
        return "dropped-samples", f"of the first epoch {missing} of {alone.total()} samples reach no rank"
    return None


def _again(record: Record, by: str, step: int) -> int:
    samples = record.samples(by, step)
    return len(samples) - len(set(samples))


def _gradients(one: Record, several: Record) -> Named:
    """Of the first step, where the weights are still the same; before clipping and after."""
    for when in ("unclipped", "gradient"):
        if one.parts(0, 1, when) and several.parts(0, 1, when) and (found := _compare_gradients(one, several, when)):
            kind, text = found
            if kind == "gradients" and (why := _random(one, several, 1)):
                raise Incomparable(f"{text}; but {why}")
            return found
    return None


def _compare_gradients(one: Record, several: Record, when: str) -> Named:
    tolerance = _tolerance(one, several, FIRST)
    factor, off = _factor(total(several.whole(1, when).values()), total(one.whole(1, when).values()))
    if max(off, abs(factor - 1)) <= tolerance:
        return None
    if off <= 10 * tolerance:
        return "factor", f"step 1: gradients are {factor:.6g} times those of one rank"
    alone, shards = one.parts(0, 1, when), []
    for rank in range(len(several.ranks)):
        held = [(name, parts) for name, parts in several.parts(rank, 1, when).items() if name in alone]
        pairs = [(now, alone[name][at]) for name, parts in held for at, now in parts.items() if at in alone[name]]
        shards.append(_factor(total(now for now, _ in pairs), total(then for _, then in pairs)))
    if all(distance <= 10 * tolerance for _, distance in shards):
        each = ", ".join(f"{factor:.6g}" for factor, _ in shards)
        text = (
            f"step 1: each rank's shards of the gradients have a factor of their own, {each}: that of a norm of shards?"
        )
        return "norm-of-shards", text
    text = f"step 1: gradients differ from those of one rank by {off:.1e} of their norm"
    mean, expected = _loss(several, 1), _loss(one, 1)
    if apart(mean, expected) > tolerance:
        text += f"; the ranks' losses have a mean of {mean:.6g} where one rank has {expected:.6g}: "
        text += "each rank counts alike, however much it holds"
    return "gradients", text


def _factor(found: Print, expected: Print) -> tuple[float, float]:
    """The factor between two, and their distance from exactly that, in units of the norm."""
    factor = found.norm / expected.norm if expected.norm else 1.0
    return factor, found.distance(expected, factor) / (found.norm or 1.0)


def _updates(one: Record, several: Record) -> Named:
    """Of the first step: what was added to each tensor, whose sketch is the difference of two."""
    before, alone, together = one.whole(1, "before"), one.whole(1, "after"), several.whole(1, "after")
    gradients, others = one.whole(1, "gradient"), several.whole(1, "gradient")
    size, found = total(gradients.values()).norm, dict[str, float]()
    for name in sorted(before.keys() & together.keys() & gradients.keys() & others.keys()):
        off = others[name].distance(gradients[name]) / (gradients[name].norm or 1.0)
        # Adam's first step is about the sign. Of gradients that are `off` apart about off / pi of the signs differ, by
        # 2, so that updates are 1.1 * sqrt(off) apart, or by one sign of a small tensor; a sketch errs by a half.
        count = sum(many for _, _, many in one.parts(0, 1, "gradient")[name])
        share = 0.05 if off <= FIRST[False] else max(0.05, 4 * math.sqrt(off) + 2 / math.sqrt(count))
        alike = share * alone[name].distance(before[name]) + 1e-6 * before[name].norm
        # It makes anything of a gradient that is 0 but for rounding.
        if gradients[name].norm > 1e-4 * size and together[name].distance(alone[name]) > alike:
            found[name] = off
    if not found:
        return None
    most = max(found.values())
    how = "with equal gradients" if most <= FIRST[False] else f"with gradients up to {most:.0e} apart"
    text = f"step 1: the optimizer changes {some(found)} differently, {how}"
    return "updates", f"{text}: does it use a norm or a mean of one rank's shard?"


def _losses(one: Record, several: Record) -> Named:
    for step in _alike(one, several):
        if _random(one, several, step):
            return None
        off = apart(_loss(several, step), _loss(one, step))
        if off > _tolerance(one, several, LATER):
            return "losses", f"step {step}: the mean of the ranks' losses is {off:.1e} from one rank's"
    return None


# Each group only where the ones before it found nothing.
GROUPS: list[list[Rule]] = [
    [_unset, _weights, _same_data, _settings, _left],
    UNSYNCHRONISED,
    [_drift, _norms, _unheld, _buffers],
    HABITS,
    [_samples],
    [_gradients],
    [_updates],
    [_losses],
]
ALONE = 5  # groups that say something where the samples aren't the same

"""Two records of what should be the same training: bit-equal, equal to rounding, or different, and since where.

A pure function of the records, which knows nothing of how they were made.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from migration.prove.fingerprint import total
from migration.prove.record import Event, Record, some

EQUAL, ROUNDING, DIFFERENT = "bit-equal", "equal to rounding", "different"
FAULT = "different by this cause alone"  # shown by a run without it
# How far apart the first difference may be, and losses, norms and gradients at any later step, in units of the larger
# value. Losses alone say too little: few steps with gradients that add up leave them close.
FIRST = {False: 1e-5, True: 3e-2}
LATER = {False: 1e-3, True: 1e-1}
LEFT = (
    "model.zero_grad() between forward and backward doesn't reach parameters that are gathered, under FSDP2 always the "
    "root's: their gradients add up; call optimizer.zero_grad(), or call it before forward"
)


@dataclass
class Difference:
    """The first: `what`, samples, loss, norm, gradient, parameter, buffer, settings or calls, and of which tensor."""

    step: int
    what: str
    name: str = ""
    rank: int | None = None
    before: Any = None
    after: Any = None
    relative: float | None = None  # None where no number would say it

    def line(self) -> str:
        where = f"step {self.step}: {self.what}" + (f" {self.name}" if self.name else "")
        where += f" on rank {self.rank}" if self.rank is not None else ""
        values = f": {self.before} before, {self.after} after" if self.before is not None else ""
        return where + values + ("" if self.relative is None else f", {self.relative:.1e} apart")


@dataclass
class Verdict:
    """`cause` is why, if it is known; `cure`, one of `rank.CURES`, is what would show that it is."""

    verdict: str
    steps: int
    table: list[dict[str, Any]]
    first: Difference | None = None
    parameter: Difference | None = None  # the first that is one of a parameter
    beyond: Difference | None = None  # the first that no rounding explains, if an earlier one may be rounding
    cause: str | None = None
    cure: str | None = None
    loss_apart: float = 0.0  # the most, in units of the larger, of all losses
    lacks: list[str] = field(default_factory=list)  # which program has nothing of the FSDP that it is to have

    @property
    def status(self) -> int:
        return 0 if self.verdict in (EQUAL, FAULT) or (self.verdict == ROUNDING and self.cause) else 1

    def as_json(self) -> dict[str, Any]:
        """NaN and infinities, which JSON has not, are words."""
        return dict(json.loads(json.dumps({**asdict(self), "status": self.status}), parse_constant=str))


def apart(one: float | None, other: float | None) -> float:
    """In units of the larger; 0 for two equal ones, NaN with NaN too."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    off = abs(one - other) / max(abs(one), abs(other))
    return off if math.isfinite(off) else math.inf


def compare(before: Record, after: Record) -> Verdict:
    found = list(_differences(before, after))
    losses = [one.relative or 0.0 for one in found if one.what == "loss"]
    verdict = Verdict(EQUAL, max(before.steps, after.steps), _table(before, after), loss_apart=max(losses, default=0.0))
    if not found:
        return verdict
    first = verdict.first = found[0]
    verdict.parameter = next((one for one in found if one.what == "parameter"), None)
    low = before.facts()["low"] or after.facts()["low"]
    exact = first.what == "norm" and not any(one["low"] for one in before.of(0, "clip", first.step))
    close = first.relative is not None and first.relative <= FIRST[low and not exact]
    later = (one for one in found if one.what in ("loss", "norm", "gradient of"))
    verdict.beyond = next((one for one in later if one.relative is None or one.relative > LATER[low]), None)
    verdict.verdict = ROUNDING if close and verdict.beyond is None else DIFFERENT
    for rule in CAUSES if verdict.verdict == ROUNDING else FAULTS:
        if named := rule(before, after, first):
            verdict.cause, verdict.cure = named
            break
    return verdict


def require_a_move(verdict: Verdict, before: Record, after: Record) -> None:
    """Say which program lacks FSDP, and mark a verdict that shows no move. DDP may take the place of NO_SHARD."""
    old, new = before.facts(), after.facts()
    verdict.lacks += ["BEFORE has no unit of FSDP1"] * (not old["fsdp1"])
    verdict.lacks += ["AFTER has no group of FSDP2" + ", but units of FSDP1" * new["fsdp1"]] * (not new["fsdp2"])
    if not new["fsdp2"] and (new["fsdp1"] or not old["fsdp1"]):
        verdict.verdict += ", and no move to FSDP2"


def _differences(before: Record, after: Record) -> Iterator[Difference]:
    """In the order in which one leads to the other."""
    if len(before.ranks) != len(after.ranks):
        yield Difference(1, "ranks", before=len(before.ranks), after=len(after.ranks))
        return
    yield from _of_tensors(before, after, 1, "before", "initial parameter")
    for step in range(1, min(before.steps, after.steps) + 1):
        for rank in range(len(before.ranks)):
            by = [source for source in before.sources if source in after.sources]
            if by and all(sorted(before.samples(s, step, rank)) != sorted(after.samples(s, step, rank)) for s in by):
                yield Difference(step, "samples", rank=rank)
            one, other = before.losses(rank, step), after.losses(rank, step)
            if len(one) != len(other):
                yield Difference(step, "calls of backward", rank=rank, before=len(one), after=len(other))
            for a, b in zip(one, other, strict=False):
                if off := apart(a, b):
                    yield Difference(step, "loss", rank=rank, before=a, after=b, relative=off)
        yield from _of_tensors(before, after, step, "unclipped", "gradient of")
        if off := apart(before.norm(step), after.norm(step)):
            yield Difference(step, "norm", before=before.norm(step), after=after.norm(step), relative=off)
        yield from _of_tensors(before, after, step, "gradient", "gradient of")
        for ours, theirs in zip(before.of(0, "settings", step), after.of(0, "settings", step), strict=False):
            yield from _of_settings(step, ours, theirs)
        yield from _of_tensors(before, after, step, "after", "parameter")
        yield from _of_buffers(before, after, step)
    if before.steps != after.steps:
        yield Difference(min(before.steps, after.steps) + 1, "steps", before=before.steps, after=after.steps)


def _of_tensors(before: Record, after: Record, step: int, when: str, what: str) -> Iterator[Difference]:
    """The one that is farthest apart, if any is, in units of all of them: what should be 0 may differ as it likes."""
    ours, theirs = before.whole(step, when), after.whole(step, when)
    size = max(total(ours.values()).norm, total(theirs.values()).norm) or 1.0
    for name in sorted(ours.keys() ^ theirs.keys()):
        old, new = ("there" if name in held else "none" for held in (ours, theirs))
        yield Difference(step, what, name, before=old, after=new)
    found = [
        Difference(step, what, name, relative=ours[name].distance(theirs[name]) / size)
        for name in ours.keys() & theirs.keys()
        if ours[name].hash != theirs[name].hash
    ]
    if found:
        yield max(found, key=lambda one: one.relative or 0.0)


def _of_buffers(before: Record, after: Record, step: int) -> Iterator[Difference]:
    """Of each rank's own: batch norm's statistics may differ between ranks."""
    for rank in range(len(before.ranks)):
        ours, theirs = (record.parts(rank, step, "after", "buffers") for record in (before, after))
        for name in ours.keys() & theirs.keys():
            a, b = total(ours[name].values()), total(theirs[name].values())
            if a.hash != b.hash:
                yield Difference(step, "buffer", name, rank, relative=a.distance(b) / (max(a.norm, b.norm) or 1.0))


def _of_settings(step: int, before: Event, after: Event) -> Iterator[Difference]:
    """By parameter, of what both have: other optimizers of torch, such as fused ones, have other flags and the same
    mathematics."""
    for name in sorted(before["of"].keys() & after["of"].keys()):
        ours, theirs = (one["groups"][one["of"][name]] for one in (before, after))
        of = f"group {before['of'][name]}" if before["of"][name] == after["of"][name] else name
        for key in sorted((ours.keys() & theirs.keys()) - {"foreach", "fused", "capturable"}):
            if ours[key] != theirs[key]:
                yield Difference(step, "settings", f"{key} of {of}", before=ours[key], after=theirs[key])


Cause = tuple[str, str | None]  # and the cure
Rule = Callable[[Record, Record, Difference], Cause | None]


def _clipping(before: Record, after: Record, first: Difference) -> Cause | None:
    if first.what != "norm":  # of gradients that were bit-equal
        return None
    return "the norm's squares are summed in another order: FSDP1 by unit and rank, FSDP2 by parameter", None


def _shared_input(before: Record, after: Record, first: Difference) -> Cause | None:
    shared = after.facts()["shared"]
    if not shared or first.what != "gradient of":
        return None
    why = f"several {shared} get one input that needs a gradient: FSDP2 adds that up block by block, FSDP1 use by use"
    return why, None


def _accumulation(before: Record, after: Record, first: Difference) -> Cause | None:
    several = len(before.losses(0, first.step)) > 1
    if not (several and after.facts()["low"] and first.what == "gradient of"):
        return None
    return "microbatches are added up in FSDP2's reduce_dtype, in FSDP1 in the dtype of the computation", None


def _kept_gathered(before: Record, after: Record, first: Difference) -> Cause | None:
    order = [one["kind"] for one in before.ranks[0] if one["kind"] in ("forward", "zero", "backward")]
    if not (before.facts()["keeps_gathered"] and ("forward", "zero") in itertools.pairwise(order)):
        return None
    why = (
        "a fault of FSDP1: SHARD_GRAD_OP with use_orig_params=True and zero_grad() between forward and backward trains "
        "with wrong gradients"
    )
    return why, "reshard"


def _never_together(before: Record, after: Record, first: Difference) -> Cause | None:
    why = "a fault of FSDP1: HYBRID_SHARD with shards of one rank never synchronises its replicas"
    return (why, "together") if before.facts()["apart"] else None


def _fast_path(before: Record, after: Record, first: Difference) -> Cause | None:
    why = "TransformerEncoderLayer has a fast path in evaluation, unless it has hooks, as FSDP2's groups have"
    return (why, "slow") if before.facts()["fast"] and first.what == "loss" else None


def _since(kind: str, why: str, cure: str | None = None) -> Rule:
    """The cause of what is other from the step on in which BEFORE met a fault of FSDP1."""

    def rule(before: Record, after: Record, first: Difference) -> Cause | None:
        met = [one["step"] for rank in range(len(before.ranks)) for one in before.of(rank, kind)]
        return (f"a fault of FSDP1{why}", cure) if met and first.step >= min(met) else None

    return rule


_one_moment = _since("moments", ": on a CPU its optimizer's state, saved, has one tensor for both moments", "moments")
_lost = _since("lost", " (FC27): what is written after an evaluation is lost, as it goes on with what that gathered")


def _low_loss(before: Record, after: Record, first: Difference) -> Cause | None:
    ours, theirs = (any(event["low"] for event in one.of(0, "backward")) for one in (before, after))
    if ours or not theirs or first.what not in ("loss", "gradient of"):
        return None
    return "AFTER's loss is of 16 bits, BEFORE's isn't: FSDP2's output_dtype, as accelerate sets it with bf16", None


def _low_buffers(before: Record, after: Record, first: Difference) -> Cause | None:
    ours, theirs = (one.facts()["low_buffers"] for one in (before, after))
    names = sorted(({*ours} - {*theirs}) & after.parts(0, 1, "after", "buffers").keys())
    if first.what not in ("loss", "gradient of") or not names:
        return None
    why = f"BEFORE's buffers are of 16 bits, AFTER's aren't ({some(names)})"
    return f"{why}: FSDP1's buffer_dtype, as accelerate sets it with bf16, casts them (FP03)", None


def _seeds(before: Record, after: Record, first: Difference) -> Cause | None:
    why = "the program sets no seed on its ranks: each draws other weights, and FSDP1 and FSDP2 keep other parts"
    return (why, "seed") if first.what == "initial parameter" and first.relative is not None else None


def _left(before: Record, after: Record, first: Difference) -> Cause | None:
    if not any(one["left"] for one in after.of(0, "zero")):
        return None
    return f"in AFTER {LEFT}", None


def _samples(before: Record, after: Record, first: Difference) -> Cause | None:
    if first.what != "samples":
        return None
    by = next(source for source in before.sources if source in after.sources)
    ours, theirs = ([sorted(one.samples(by, step)) for step in range(1, one.steps + 1)] for one in (before, after))
    if ours[0] == theirs[0]:
        return "all ranks together get the same samples, each other ones: does the order of ranks differ?", None
    if sorted(itertools.chain(*ours)) == sorted(itertools.chain(*theirs)):
        return "the same samples come in another order: does the seed of the sampler differ, or set_epoch()?", None
    return "the ranks get other samples: see the sampler, the size of a batch and the seed", None


def _times(before: Record, after: Record, first: Difference) -> Cause | None:
    """One factor between all losses of the first step, while weights and samples are the same."""
    pairs = [
        pair
        for rank in range(len(before.ranks))
        for pair in zip(before.losses(rank, 1), after.losses(rank, 1), strict=False)
    ]
    if first.what != "loss" or first.step != 1 or not pairs or not all(one and other for one, other in pairs):
        return None
    factor, ranks = pairs[0][1] / pairs[0][0], len(before.ranks)
    if apart(factor, 1.0) <= FIRST[True] or any(apart(other, factor * one) > FIRST[False] for one, other in pairs):
        return None
    size = {ranks: "the number of ranks", len(before.losses(0, 1)): "the number of microbatches"}
    known = next(
        (f": {text}" for n, text in size.items() if n > 1 and min(apart(factor, n), apart(factor, 1 / n)) < 1e-4), ""
    )
    return f"the loss that AFTER passes to backward() is {factor:.6g} times that of BEFORE{known}", None


CAUSES: list[Rule] = [_clipping, _low_loss, _low_buffers, _shared_input, _accumulation, _fast_path]
FAULTS = [_seeds, _samples, _times, _kept_gathered, _never_together, _one_moment, _lost, _fast_path, _left]
FAULTS += [_low_loss, _low_buffers]


def _table(before: Record, after: Record) -> list[dict[str, Any]]:
    """Rank 0's losses and the norms."""
    return [
        {
            "step": step,
            "loss": [next(iter(one.losses(0, step)[-1:]), None) for one in (before, after)],
            "norm": [before.norm(step), after.norm(step)],
        }
        for step in range(1, min(before.steps, after.steps) + 1)
    ]

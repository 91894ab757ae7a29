"""A search for the best settings: flags, groups and meshes, each planned, the fastest that fit first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import words_of
from fsdp2.parallel import FUSED
from fsdp2_tools.plan.plans import Plan

# What takes more memory and never less the further it stands in its line, and computes nothing again.
HEAVIER: dict[str, tuple[Any, ...]] = {
    "shard_granularity": (1, 2, 4, "root"),
    "reshard_after_forward": (True, None, False),
    "explicit_prefetching": (None, 1, 2),
}
WIDTH = 4  # settings from which the search goes on
MOST_PLANS = 60

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """A plan, and the fields of Config in which it differs from where the search began."""

    changes: Changes
    plan: Plan

    @property
    def name(self) -> str:
        """The words of a command line."""
        return name_of(self.changes)

    @property
    def cost(self) -> tuple[Any, ...]:
        """The key that ranks settings, least first: of those that fit the effort, of others memory."""
        return (False, *self.effort) if self.plan.fits else (True, self.plan.bytes)

    @property
    def effort(self) -> tuple[float, ...]:
        """The time of a step.

        Where none is predicted, kinds of cost stand one after the other: slower links, computing again, microbatches,
        bytes that a step exchanges, the number of exchanges.
        """
        plan = self.plan
        if plan.time is not None:
            return plan.time.milliseconds, plan.bytes
        return *_burden(plan.config), plan.memory.exchanged_bytes, plan.memory.exchanges, plan.bytes


def _burden(config: Config) -> tuple[int, int, int]:
    """Settings that save memory and take time on any machine: slower links, computing again, microbatches."""
    again = {None: 0, "op": 1, "block": 2}[config.activation_checkpointing] + (config.chunked_loss is not None)
    return int(config.cpu_offload), again, config.grad_accumulation


def lighter(config: Config, ways: Mapping[str, Sequence[Changes]]) -> dict[str, list[Changes]]:
    """Of what may be varied, that which takes no more time on any machine: for a Config that fits as it is."""

    def is_light(changes: Changes) -> bool:
        try:
            there = _burden(dataclasses.replace(config, **changes))
        except ConfigError:  # it goes with none of the flags that are given
            return False
        return all(new <= own for new, own in zip(there, _burden(config), strict=True))

    kept = {name: [one for one in options if is_light(one)] for name, options in ways.items()}
    return {name: options for name, options in kept.items() if len(options) > 1}


def name_of(changes: Changes) -> str:
    """Changes as they stand on a command line."""
    return " ".join(word for field, value in changes.items() for word in words_of(Config, field, value)) or "default"


def choices(config: Config, ranks: int, *, gpu: bool) -> dict[str, list[Changes]]:
    """The settings to vary: how a model is sharded and computed, never what it learns.

    Precision and the global batch stay as they are. The flags' own values are choices too.

    Args:
        gpu: the ranks run on GPUs, whose optimizer is fused anyway, and have a memory beside them to offload to.
    """
    found: dict[str, list[Changes]] = {}

    def vary(name: str, *values: Any) -> None:
        found[name] = [{name: value} for value in dict.fromkeys((getattr(config, name), *values))]

    if config.strategy == "fsdp2":
        vary("replicas", *(count for count in range(1, ranks + 1) if ranks % count == 0))
        vary("shard_granularity", 1, 2, 4, "root")
        vary("reshard_after_forward", None, True, False)
        if gpu:  # on CPUs exchanges are waited for where they are issued
            vary("explicit_prefetching", None, 1, 2)
            vary("cpu_offload", False, True)
    if config.optimizer in FUSED and not gpu:
        vary("fused_optimizer", None, True)
    vary("activation_checkpointing", None, "op", "block")
    if config.spec.kind == "language":
        vary("chunked_loss", None, 1024)
    if config.global_batch_size is None:
        samples = config.batch_size * config.grad_accumulation
        found["batch_size"] = [
            {"batch_size": samples // parts, "grad_accumulation": parts}
            for parts in dict.fromkeys((config.grad_accumulation, 1, 2, 4, 8, 16, 64, samples))
            if samples % parts == 0
        ]
    return {name: ways for name, ways in found.items() if len(ways) > 1}


def neighbours(config: Config, changes: Changes, ways: Mapping[str, Sequence[Changes]]) -> Iterator[dict[str, Any]]:
    """Settings that differ in one more choice, without those that another one equals."""
    for options in ways.values():
        for option in options:
            there = {**changes, **option}
            there = {name: value for name, value in there.items() if value != getattr(config, name)}
            if there != changes and not _senseless(config, there, ways):
                yield there


def _senseless(config: Config, changes: Changes, ways: Mapping[str, Sequence[Changes]]) -> bool:
    """True if another setting does the same: one group has nothing to prefetch, and whole replicas nothing to gather.

    As many replicas as there are ranks are the most that may be chosen.
    """
    own = {**vars(config), **changes}
    ranks = max((one["replicas"] for one in ways.get("replicas", ())), default=0)
    alone = own["shard_granularity"] == "root" or own["replicas"] == ranks
    touched = {"explicit_prefetching", "reshard_after_forward"} & changes.keys()
    return alone and any(changes[name] is not None for name in touched)


def is_heavier(one: Config, other: Config) -> bool:
    """Return whether the first takes no less memory than the second, as far as that follows from their flags alone."""
    for field in dataclasses.fields(Config):
        own, its = getattr(one, field.name), getattr(other, field.name)
        line = HEAVIER.get(field.name, ())
        if field.name == "replicas":
            if own % its:
                return False
        elif own != its and not (own in line and its in line and line.index(own) > line.index(its)):
            return False
    return True


def search(
    config: Config,
    ways: Mapping[str, Sequence[Changes]],
    replan: Callable[[Config, str], Plan],
    *,
    width: int = WIDTH,
    most: int = MOST_PLANS,
) -> list[Setting]:
    """Settings that were planned, the best first.

    From the best ones so far every setting with one more change is planned, until that improves nothing. What is
    heavier than a setting that doesn't fit is passed over, and a change that gains nothing isn't built upon. With
    `width` and `most` as large as the space, all others are planned.

    Args:
        replan: plans a Config, whose changes it is told; ConfigError passes a setting over.
        ways: what may be varied, as `choices` says.
        width: from how many settings the search goes on.
        most: plans, at most.

    Raises ConfigError if the Config itself can't be planned.
    """
    found = [Setting({}, replan(config, "default"))]
    too_heavy = [] if found[0].plan.fits else [config]
    seen = {name_of({})}
    expanded: set[str] = set()
    while one := next(
        (s for s in sorted(found, key=attrgetter("cost"))[:width] if s.name not in expanded and worth(s, found)), None
    ):
        expanded.add(one.name)
        for changes in neighbours(config, one.changes, ways):
            name = name_of(dict(sorted(changes.items())))
            if name in seen:
                continue
            if len(seen) >= most:
                return sorted(found, key=attrgetter("cost"))
            try:
                there = dataclasses.replace(config, **changes)
                if any(is_heavier(there, other) for other in too_heavy):
                    continue
                seen.add(name)
                found.append(Setting(changes, replan(there, name_of(changes))))
            except ConfigError:
                continue
            if not found[-1].plan.fits:
                too_heavy.append(there)
    return sorted(found, key=attrgetter("cost"))


def worth(one: Setting, found: Sequence[Setting]) -> bool:
    """Return whether to go on from a setting: not where a part of its changes alone is as fast, to a thousandth."""
    own = one.plan.time
    parts = (other for other in found if other.changes.items() < one.changes.items())
    return not any(
        part.plan.fits and one.plan.fits and part.plan.time.milliseconds <= 1.001 * own.milliseconds
        for part in parts
        if own is not None and part.plan.time is not None
    )


def frontier(found: Sequence[Setting]) -> list[Setting]:
    """Those that no other beats in both memory and time, the least memory first."""
    best: list[Setting] = []
    for one in sorted(found, key=lambda one: (one.plan.bytes, one.effort)):
        if not best or one.effort < best[-1].effort:
            best.append(one)
    return best


def varied(found: Sequence[Setting], count: int) -> list[Setting]:
    """So many of a ranking: half of them the best change of each flag by itself, the others the best of all.

    The best of all often share one flag; if the prediction is wrong about that flag, they are all wrong.
    """
    alone: dict[frozenset[str], Setting] = {}
    for one in found:
        if len(one.changes) == 1 or one.changes.keys() == {"batch_size", "grad_accumulation"}:
            alone.setdefault(frozenset(one.changes), one)
    chosen = list(alone.values())[: (count + 1) // 2]
    chosen += [one for one in found if one not in chosen][: count - len(chosen)]
    return [one for one in found if one in chosen]

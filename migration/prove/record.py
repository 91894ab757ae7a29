"""The records of one run's ranks, put together: whole tensors from their parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from migration.prove.fingerprint import Print, total

SOURCES = ("model", "loader", "index")
Event = dict[str, Any]
Place = tuple[int, int, int]  # first index, last index, how many
Parts = dict[str, dict[Place, Print]]  # by name


@dataclass
class Record:
    """The events of each rank, as `Recorder` writes them."""

    ranks: list[list[Event]]

    @cached_property
    def steps(self) -> int:
        """The number of steps that all ranks recorded."""
        return min(sum(self._is(event, "state", when="after") for event in events) for events in self.ranks)

    def of(self, rank: int, kind: str, step: int | None = None, **fields: Any) -> list[Event]:
        return [one for one in self.ranks[rank] if self._is(one, kind, **fields) and step in (None, one["step"])]

    @staticmethod
    def _is(event: Event, kind: str, **fields: Any) -> bool:
        return event["kind"] == kind and all(event[key] == value for key, value in fields.items())

    def facts(self, rank: int = 0) -> Event:
        return self.of(rank, "facts")[0]

    @cached_property
    def readers(self) -> list[int]:
        """The ranks whose samples and losses count: all, but where layers are split one of those that share samples."""
        ranks = range(len(self.ranks))
        if not self.facts()["split_otherwise"]:
            return list(ranks)
        first: dict[str, int] = {}
        for rank in ranks:
            first.setdefault(
                repr([self.samples(by, step, rank) for by in SOURCES for step in range(1, self.steps + 1)]), rank
            )
        return list(first.values())

    def dtypes(self) -> dict[str, dict[str, str]]:
        """By parameter, as the ranks have it together: of FSDP1's flat parameters each has some."""
        events = (one for rank in range(len(self.ranks)) for one in self.of(rank, "dtypes"))
        return {name: row for one in events for name, row in one["of"].items()}

    def parts(self, rank: int, step: int, when: str, what: str = "parts") -> Parts:
        """One rank's parts: parameters or their gradients, or `buffers`. None where nothing was recorded."""
        return {
            name: {tuple(one["place"]): Print(one["hash"], one["square"], one["sketch"]) for one in parts}
            for event in self.of(rank, "state", step, when=when)[-1:]
            for name, parts in event[what].items()
        }

    def whole(self, step: int, when: str) -> dict[str, Print]:
        """Of each tensor, put together. A place that several ranks hold counts once, as the first of them has it."""
        found: Parts = {}
        for rank in reversed(range(len(self.ranks))):
            for name, parts in self.parts(rank, step, when).items():
                found.setdefault(name, {}).update(parts)
        return {name: total(parts.values()) for name, parts in found.items()}

    def apart(self, step: int, when: str) -> dict[str, tuple[int, int]]:
        """Names of which two ranks hold the same place with other values -> those two ranks."""
        seen: dict[tuple[str, Place], tuple[int, int]] = {}
        found: dict[str, tuple[int, int]] = {}
        for rank in range(len(self.ranks)):
            for name, parts in self.parts(rank, step, when).items():
                for place, one in parts.items():
                    first, digest = seen.setdefault((name, place), (rank, one.hash))
                    if digest != one.hash:
                        found.setdefault(name, (first, rank))
        return found

    def cuts(self) -> dict[str, list[tuple[int, int]]]:
        """The begin and end of the ranks' parts of each tensor, of those whose values lie together."""
        found: dict[str, set[tuple[int, int]]] = {}
        for rank in range(len(self.ranks)):
            for name, parts in self.parts(rank, 1, "before").items():
                places = {(first, last + 1) for first, last, count in parts if last + 1 - first == count}
                found.setdefault(name, set()).update(places)
        return {name: sorted(places) for name, places in found.items()}

    @cached_property
    def sources(self) -> list[str]:
        """The places where samples are seen: in what models get, in what loaders give, in what their samplers draw."""
        return [by for by in SOURCES if self.of(0, "data", by=by)]

    def samples(self, by: str, step: int, rank: int | None = None, rows: str = "rows") -> list[int]:
        """Of one rank or of all; `rows` or `trimmed`, in one order."""
        ranks = self.readers if rank is None else [rank]
        return [row for each in ranks for one in self.of(each, "data", step, by=by) for row in one[rows]]

    def epoch(self, by: str) -> tuple[Counter[int], bool]:
        """The samples of all ranks until a loader ends for the first time, and whether one does on each rank."""
        found, ended = Counter[int](), []
        for events in (self.ranks[rank] for rank in self.readers):
            end = next((number for number, one in enumerate(events) if one["kind"] == "epoch"), None)
            ended.append(end is not None)
            for one in events[:end]:
                if self._is(one, "data") and one["by"] == by and one["step"] <= self.steps:
                    found.update(one["rows"])
        return found, all(ended)

    def losses(self, rank: int, step: int) -> list[float]:
        return [one["value"] for one in self.of(rank, "backward", step)]

    def norms(self, step: int) -> list[float]:
        """That the last clipping of a step returned, on each rank that clipped."""
        clips = [self.of(rank, "clip", step)[-1:] for rank in range(len(self.ranks))]
        return [one["norm"] for last in clips for one in last]

    def norm(self, step: int) -> float | None:
        """Rank 0's, or the first's that has one."""
        return next(iter(self.norms(step)), None)


def some(names: Iterable[str]) -> str:
    """The first three, and how many more."""
    names = list(dict.fromkeys(names))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

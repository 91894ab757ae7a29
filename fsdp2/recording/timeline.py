"""A ledger as a file: columns of numbers and tables of names, gzipped JSON, so that reading it runs no code."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdp2.recording.ledger import KINDS, Allocation, Collective, Phase, by_kind

VERSION = 1


def file_name(rank: int) -> str:
    return f"rank{rank}_memory_timeline.json.gz"


@dataclass
class Timeline:
    """What one rank had allocated, when and for what."""

    facts: dict[str, Any]  # of the run and this rank
    allocations: list[Allocation]
    phases: list[Phase]
    collectives: list[Collective]

    def changes(self) -> Iterator[tuple[float, int, Allocation]]:
        """(seconds, bytes more or less, allocation), in the order of time; what is freed goes first."""
        events = [(a.born, 1, i) for i, a in enumerate(self.allocations)]
        events += [(a.died, 0, i) for i, a in enumerate(self.allocations) if a.died is not None]
        for when, born, index in sorted(events):
            allocation = self.allocations[index]
            yield when, allocation.bytes if born else -allocation.bytes, allocation

    def peak(self) -> tuple[float, int]:
        """When the most bytes were allocated, and how many."""
        total = most = 0
        at = 0.0
        for when, change, _ in self.changes():
            total += change
            if total > most:
                most, at = total, when
        return at, most

    def alive(self, when: float) -> list[Allocation]:
        """What was allocated at a moment, largest first."""
        there = [a for a in self.allocations if a.born <= when and (a.died is None or a.died > when)]
        return sorted(there, key=lambda allocation: -allocation.bytes)

    def by_kind(self, when: float) -> dict[str, int]:
        """Bytes of each kind at a moment."""
        return by_kind(self.alive(when))

    def phase_at(self, when: float) -> Phase:
        return [phase for phase in self.phases if phase.began <= when][-1]


def dump(line: Timeline) -> bytes:
    modules, operations = _Names(), _Names()
    columns: dict[str, list[Any]] = {
        "bytes": [a.bytes for a in line.allocations],
        "born": [round(a.born, 6) for a in line.allocations],
        "died": [None if a.died is None else round(a.died, 6) for a in line.allocations],
        "kind": [KINDS.index(a.kind or "temporary") for a in line.allocations],
        "phase": [a.phase for a in line.allocations],
        "module": [modules.index(a.module) for a in line.allocations],
        "operation": [operations.index(a.operation) for a in line.allocations],
    }
    content = {
        "version": VERSION,
        "facts": line.facts,
        "kinds": KINDS,
        "modules": modules.names,
        "operations": operations.names,
        "phases": [[p.name, p.step, round(p.began, 6)] for p in line.phases],
        "collectives": [[c.name, c.bytes, c.step] for c in line.collectives],
        "allocations": columns,
    }
    # No time in the header: the same ledger gives the same bytes.
    return gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)


def load(data: bytes) -> Timeline:
    """The inverse. Raises ValueError if it is no timeline of this version."""
    try:
        content = json.loads(gzip.decompress(data))
        if content["version"] != VERSION:
            raise ValueError(f"is version {content['version']} of the format, and this reads {VERSION}")
        columns = content["allocations"]
        allocations = [
            Allocation(
                bytes=size,
                born=born,
                died=died,
                kind=content["kinds"][kind],
                phase=phase,
                module=content["modules"][module],
                operation=content["operations"][operation],
            )
            for size, born, died, kind, phase, module, operation in zip(
                *(columns[k] for k in ("bytes", "born", "died", "kind", "phase", "module", "operation")), strict=True
            )
        ]
        return Timeline(
            content["facts"],
            allocations,
            [Phase(*phase) for phase in content["phases"]],
            [Collective(*collective) for collective in content["collectives"]],
        )
    except (OSError, EOFError, KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"is not a timeline ({type(error).__name__}: {error})") from None


class _Names:
    """Texts in the order of their first use, each with its number."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}

    def index(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]

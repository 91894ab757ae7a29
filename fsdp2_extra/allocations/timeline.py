"""A ledger as a file: columns of numbers and tables of names, gzipped JSON, so that reading it runs no code."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from fsdp2_extra.allocations.ledger import KINDS, Allocation, Collective, Phase, by_kind

VERSION = 1


def file_name(rank: int) -> str:
    """Of a rank's timeline in the run directory."""
    return f"rank{rank}_memory_timeline.json.gz"


@dataclass
class Timeline:
    """One rank's allocations over time, each with its purpose."""

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
        """The event after which the most bytes were allocated, and their number."""
        total = most = 0
        at = 0.0
        for when, change, _ in self.changes():
            total += change
            if total > most:
                most, at = total, when
        return at, most

    def alive(self, when: float) -> list[Allocation]:
        """List the allocations of a moment, largest first."""
        there = [a for a in self.allocations if a.born <= when and (a.died is None or a.died > when)]
        return sorted(there, key=lambda allocation: -allocation.bytes)

    def by_kind(self, when: float) -> dict[str, int]:
        """Bytes of each kind at a moment."""
        return by_kind(self.alive(when))

    def phase_at(self, when: float) -> Phase:
        """The rank's phase at a moment; before the first phase, that one."""
        return ([phase for phase in self.phases if phase.began <= when] or self.phases[:1])[-1]


def dump(line: Timeline) -> bytes:
    """A timeline as gzipped JSON, a column for each property of its allocations."""
    modules: dict[str, int] = {}  # text -> its number, in the order of their first use
    operations: dict[str, int] = {}
    columns: dict[str, list[Any]] = {
        "bytes": [a.bytes for a in line.allocations],
        "born": [round(a.born, 6) for a in line.allocations],
        "died": [None if a.died is None else round(a.died, 6) for a in line.allocations],
        "kind": [KINDS.index(a.kind or "temporary") for a in line.allocations],
        "phase": [a.phase for a in line.allocations],
        "module": [modules.setdefault(a.module, len(modules)) for a in line.allocations],
        "operation": [operations.setdefault(a.operation, len(operations)) for a in line.allocations],
    }
    content = {
        "version": VERSION,
        "facts": line.facts,
        "kinds": KINDS,
        "modules": list(modules),
        "operations": list(operations),
        "phases": [[p.name, p.step, round(p.began, 6)] for p in line.phases],
        "collectives": [[c.name, c.bytes, c.step] for c in line.collectives],
        "allocations": columns,
    }
    # No time in the header: the same ledger gives the same bytes.
    return gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)


def load(data: bytes) -> Timeline:
    """The inverse. Raises ValueError if it is no timeline of this version; whoever sends one may have made it up."""
    try:
        content = json.loads(_unpacked(data), parse_constant=_refuse)
        if content["version"] != VERSION:
            raise ValueError(f"is version {str(content['version'])[:20]} of the format, and this reads {VERSION}")
        columns = content["allocations"]
        phases = [Phase(*_row(phase, str, int, float)) for phase in content["phases"]]
        names = [_row(content[k], *[str] * len(content[k])) for k in ("kinds", "modules", "operations")]
        allocations = [
            Allocation(
                bytes=size,
                born=born,
                died=None if died is None else _row([died], float)[0],
                kind=names[0][kind],
                phase=range(len(phases))[phase],
                module=names[1][module],
                operation=names[2][operation],
            )
            for died, row in zip(columns["died"], zip(*(columns[k] for k in _COLUMNS), strict=True), strict=True)
            for size, born, kind, phase, module, operation in [_row(row, int, float, int, int, int, int)]
        ]
        _row([content["facts"]["rank"], phases[0].name], int, str)
        if not {*names[0]} <= {*KINDS}:
            raise TypeError("an unknown kind of memory")
        collectives = [Collective(*_row(collective, str, int, int)) for collective in content["collectives"]]
        return Timeline(content["facts"], allocations, phases, collectives)
    except (LookupError, TypeError, AttributeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"is not a timeline ({type(error).__name__}: {str(error)[:80]})") from None


_COLUMNS = ("bytes", "born", "kind", "phase", "module", "operation")
# Columns of numbers shrink to a tenth; what grows far more when it is unpacked is made to fill the memory.
_MOST_UNPACKED = 200


def _unpacked(data: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        content = unpacker.decompress(data, _MOST_UNPACKED * len(data) + 1)
    except zlib.error as error:
        raise ValueError(f"is not a timeline ({error})") from None
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("is not a timeline (it is cut, longer than it says, or far larger unpacked)")
    return content


def _row(values: Sequence[Any], *kinds: type[Any]) -> Sequence[Any]:
    """Values of these types, with numbers that a machine has. Raises TypeError."""
    for value, kind in zip(values, kinds, strict=True):
        if not (type(value) is kind or (kind is float and type(value) is int)):
            raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")
        if not isinstance(value, str) and not 0 <= value < 1 << 63:
            raise TypeError("a number that nothing has measured")
    return values


def _refuse(constant: str) -> NoReturn:
    raise TypeError(f"{constant} is not JSON")

"""A timeline as curves: bytes of each kind at chosen moments, few enough to draw."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp2_extra.allocations.ledger import KINDS
from fsdp2_extra.allocations.timeline import Timeline


@dataclass
class Series:
    """`bytes[kind][i]` are allocated from `times[i]` seconds on. Kinds without any are left out."""

    times: list[float]
    bytes: dict[str, list[int]]


def series(line: Timeline, points: int = 4000, within: tuple[float, float] = (-math.inf, math.inf)) -> Series:
    """The curves of a timeline, or of a part of it: from one second to another.

    Of each of `points / 2` equal stretches of time the moment with the most bytes and the last one are kept, so that
    no peak gets lost, whatever is left out between.
    """
    changes = [change for change in line.changes() if change[0] <= within[1]]
    if not changes:
        return Series([], {})
    # What was allocated before the part counts from its beginning on.
    began, ended = max(changes[0][0], within[0]), max(changes[-1][0], changes[0][0] + 1e-9)
    buckets = max(1, points // 2)
    width = (ended - began) / buckets
    now = dict.fromkeys(KINDS, 0)
    total = 0
    highest: dict[int, tuple[int, float, list[int]]] = {}  # of each stretch that has any
    last: dict[int, tuple[float, list[int]]] = {}
    for when, change, allocation in changes:
        bucket = min(buckets - 1, max(0, int((when - began) / width)))
        now[allocation.kind or "temporary"] += change
        total += change
        last[bucket] = (max(when, began), list(now.values()))
        if bucket not in highest or total >= highest[bucket][0] or when < began:
            highest[bucket] = (total, *last[bucket])
    kept: list[tuple[float, list[int]]] = []
    for bucket, end in last.items():
        _, when, row = highest[bucket]
        kept += [(when, row), end] if end[0] > when else [(when, row)]
    columns = dict(zip(KINDS, map(list, zip(*(row for _, row in kept), strict=True)), strict=True))
    return Series([when for when, _ in kept], {kind: column for kind, column in columns.items() if any(column)})

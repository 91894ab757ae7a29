"""Simulate torch's CUDA allocator: the memory that it reserves for a sequence of allocations.

Memory of one stream is never given to another, and what is freed stays reserved. So a device holds more than its
tensors: the peaks of streams add up, though they aren't at the same time, and holes are left that are too small for
what comes next. The device is taken to have room, so that nothing is given back to it.

Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.15: `round_size`, `get_pool`, `get_allocation_size`,
`should_split`, `get_free_block`, `try_merge_blocks`, and `map_block` for expandable segments.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any

ROUNDED = 512  # kMinBlockSize: each allocation is a multiple of it
SMALL = 1 << 20  # kSmallSize: up to here, allocations share segments of SMALL_SEGMENT
SMALL_SEGMENT, LARGE_SEGMENT = 2 << 20, 20 << 20  # kSmallBuffer, kLargeBuffer
LARGE = 10 << 20  # kMinLargeAlloc: from here on, a segment is made for one allocation, of a multiple of SMALL_SEGMENT


class _Block:
    """A stretch of a segment, between its neighbours."""

    __slots__ = ("after", "before", "number", "size", "used")

    def __init__(self, size: int, number: int) -> None:
        self.size, self.number, self.used = size, number, False
        self.before: _Block | None = None
        self.after: _Block | None = None


class _Pool:
    """Segments of one stream for small allocations, or for large ones."""

    def __init__(self, *, small: bool, expandable: bool) -> None:
        self.small, self.expandable, self.reserved = small, expandable, 0
        self._free: list[tuple[int, int, _Block]] = []  # by size, then by age, which stands for the address
        self._last: _Block | None = None  # of the one segment that grows
        self._count = 0

    def take(self, size: int) -> _Block:
        at = bisect.bisect_left(self._free, (size, -1))
        block = self._free.pop(at)[2] if at < len(self._free) else self._more(size)
        rest = block.size - size
        if rest >= ROUNDED if self.small or self.expandable else rest > SMALL:
            block.size = size
            left = self._block(rest)
            left.before, left.after = block, block.after
            if left.after is not None:
                left.after.before = left
            block.after = left
            if self._last is block:
                self._last = left
            self._put(left)
        block.used = True
        return block

    def give(self, block: _Block) -> None:
        block.used = False
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.used:
                self._remove(neighbour)
                first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
                first.size += second.size
                first.after = second.after
                if first.after is not None:
                    first.after.before = first
                if self._last is second:
                    self._last = first
                block = first
        self._put(block)

    def _more(self, size: int) -> _Block:
        """A block at least of this size, in memory that wasn't reserved before."""
        if not self.expandable:
            whole = SMALL_SEGMENT if self.small else LARGE_SEGMENT if size < LARGE else _up(size, SMALL_SEGMENT)
            self.reserved += whole
            return self._block(whole)
        last = self._last
        there = last.size if last is not None and not last.used else 0
        new = _up(size - there, SMALL_SEGMENT if self.small else LARGE_SEGMENT)
        self.reserved += new
        if there:
            assert last is not None
            self._remove(last)
            last.size += new
            return last
        block = self._block(new)
        block.before = last
        if last is not None:
            last.after = block
        self._last = block
        return block

    def _block(self, size: int) -> _Block:
        self._count += 1
        return _Block(size, self._count)

    def _put(self, block: _Block) -> None:
        bisect.insort(self._free, (block.size, block.number, block))

    def _remove(self, block: _Block) -> None:
        del self._free[bisect.bisect_left(self._free, (block.size, block.number))]


def reserved(events: Iterable[tuple[Any, int, str]], *, expandable: bool = False) -> int:
    """Bytes that are reserved in the end, which never get less.

    Args:
        events: (key, bytes, stream) of an allocation; of a release its key and -1 bytes.
        expandable: as PYTORCH_ALLOC_CONF=expandable_segments:True makes segments.
    """
    pools: dict[tuple[str, bool], _Pool] = {}
    there: dict[Any, tuple[_Pool, _Block]] = {}
    for key, size, stream in events:
        if size < 0:
            if key in there:
                pool, block = there.pop(key)
                pool.give(block)
        elif size:
            rounded = max(_up(size, ROUNDED), ROUNDED)
            small = rounded <= SMALL
            pool = pools.setdefault((stream, small), _Pool(small=small, expandable=expandable))
            there[key] = pool, pool.take(rounded)
    return sum(pool.reserved for pool in pools.values())


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit

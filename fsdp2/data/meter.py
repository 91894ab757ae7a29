"""How far a preparation is, in a line."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fsdp2.units import size

Say = Callable[[str], None]


def silent(text: str) -> None:
    """For who shows no progress."""


class Meter:
    """Says from time to time how far it is, how fast, and how long it will take.

    Args:
        sizes: of the files, in bytes.
        seconds: between two lines.
    """

    def __init__(self, sizes: Sequence[int], say: Say, seconds: float) -> None:
        self._sizes, self._say, self._seconds = sizes, say, seconds
        self._said = time.monotonic()
        self._first: tuple[float, float, int] | None = None  # what was there isn't the work of a process that goes on

    def show(self, number: int, share: float, tokens: int) -> None:
        """`share` of the file with this number is done, and all files have so many tokens up to there."""
        now, whole = time.monotonic(), max(1, sum(self._sizes))
        done = (sum(self._sizes[:number]) + share * self._sizes[number]) / whole
        if self._first is None:
            self._first = now, done, tokens
        began, before, tokens_before = self._first
        if now - self._said < self._seconds or done == before:
            return
        self._said, took = now, now - began
        rate, left = (tokens - tokens_before) / took, took * (1 - done) / (done - before)
        self._say(f"{done:.1%} of {size(whole)}, {tokens:,} tokens, {rate:,.0f} tokens/s, {clock(left)} left")


def clock(seconds: float) -> str:
    """Seconds as a person says them: `1 h 5 min`, `4 min 3 s`, `12 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"

"""Two lanes of tests side by side, and tests that must be `alone`: what they measure is the machine's time.

`make test` starts pytest with pytest-xdist's `-n 2`. Each lane is a process with its own ranks, temporary folder and
port numbers, so tests of different lanes share nothing but the machine. While a test marked `alone` runs, the other
lane rests. In one lane, as pytest runs by default, nothing of this does anything.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def is_alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


class Lane:
    """A lock that tests share, and that a test which must be alone has for itself, with those that follow it."""

    def __init__(self, folder: Path) -> None:
        # Who waits for the lock holds the door: a lane that shares the lock again and again can't overtake.
        self._door, self._lock = (os.open(folder / name, os.O_CREAT | os.O_RDWR) for name in ("door", "lock"))
        self._kept = False

    def enter(self, alone: bool) -> None:
        if self._kept:
            return
        with _locked(self._door):
            fcntl.flock(self._lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)

    def leave(self, keep: bool) -> None:
        self._kept = keep
        if not keep:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Around all of a test, also of its time limit, which a wait doesn't count for."""
        self.enter(is_alone(item))
        try:
            return (yield)
        finally:
            self.leave(is_alone(item) and is_alone(nextitem))


@contextmanager
def _locked(file: int) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield
    fcntl.flock(file, fcntl.LOCK_UN)


def configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # of a lane, and not of a pytest that a lane's test starts
        folder = Path(config.getoption("basetemp")).parent  # each lane's is below the session's
        config.pluginmanager.register(Lane(folder), "lane")

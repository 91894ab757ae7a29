"""A folder for one process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "lock"


@contextmanager
def alone(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a folder, which is made; the operating system frees it when the process dies.

    The body may move or remove the folder, without the file `LOCK`: who waits then makes a new one.

    Args:
        waiting: is called once if another process has it.

    Raises OSError if it can't be made or locked.
    """
    lock = _locked(folder, waiting)
    try:
        yield
    finally:
        os.close(lock)


def _locked(folder: Path, waiting: Callable[[], None]) -> int:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # whoever had it has finished
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_at(folder / LOCK, lock):
            return lock
        os.close(lock)


def _is_at(path: Path, opened: int) -> bool:
    """Return whether an opened file is at its path still: its folder may have been moved while this process waited."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(opened))
    except FileNotFoundError:
        return False

"""Commands for a machine that is lent for minutes: each ends by itself, and leaves no process behind.

Children run with PYTHONFAULTHANDLER, so that SIGABRT makes any Python process among them print the stacks of all of its
threads and end: torchrun, its ranks, a test's processes, whatever they wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

SECONDS = 530.0  # of a command that may take ten minutes, its start and the way back of its files included
PRINTING = 5.0  # seconds for stacks to be written
PR_SET_CHILD_SUBREAPER = 36


class Deadline:
    """Seconds that are left.

    Args:
        seconds: from now on.
        now: the clock.
    """

    def __init__(self, seconds: float = SECONDS, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._end = now, now() + seconds

    def left(self) -> float:
        """Seconds until the time is up; never less than 0."""
        return max(0.0, self._end - self._now())

    def allows(self, seconds: float) -> bool:
        """True if an item that takes so long may begin."""
        return self.left() >= seconds


def run(
    command: Sequence[str],
    seconds: float,
    *,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> int | None:
    """Run a command, show its output as it comes and append it to `log`.

    When `seconds` have passed, every Python process that it has started prints its stacks and ends. No descendant is
    left when this returns or raises.

    Returns its exit status; None if its time was up.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    own = set(descendants(os.getpid()))
    with _adopting(), contextlib.ExitStack() as files:
        file = files.enter_context(log.open("a")) if log is not None else None
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**(os.environ if environment is None else environment), "PYTHONFAULTHANDLER": "1"}
            | {"PYTHONUNBUFFERED": "1"},
        )

        def show() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
                if file is not None:
                    file.write(line)
                    file.flush()

        reader = threading.Thread(target=show, daemon=True)
        reader.start()
        status: int | None = None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"--- {seconds:.0f} s are over; the stacks of what still runs:", flush=True)
            print_stacks(set(descendants(os.getpid())) - own)
        finally:
            _end(process, own)
            reader.join(PRINTING)
    return status


def descendants(pid: int) -> Iterator[int]:
    """Processes below one, in any session, without those that have ended; parents first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry))
    waiting = [pid]
    while waiting:
        found = children.get(waiting.pop(), [])
        yield from found
        waiting += found


def print_stacks(pids: set[int]) -> None:
    """Have processes print their stacks and end, one after another: they share a pipe, and would write into each
    other's lines."""
    until = time.monotonic() + PRINTING
    for pid in pids:
        _signal({pid}, signal.SIGABRT)
        while time.monotonic() < until and pid in descendants(os.getpid()):
            time.sleep(0.01)


def _end(process: subprocess.Popen[str], own: set[int]) -> None:
    """Kill what is left; again, since what is killed may just have started another."""
    killed: set[int] = set()
    while left := set(descendants(os.getpid())) - own:
        killed |= left
        _signal(left, signal.SIGKILL)
        time.sleep(0.05)
    process.wait()
    for pid in killed:
        with contextlib.suppress(ChildProcessError):  # it was another's child, or has been waited for
            os.waitpid(pid, 0)


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Make orphans among the descendants this process's children: ranks whose torchrun is gone stay in its sight."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

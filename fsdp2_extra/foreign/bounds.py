"""A library works on a stranger's file in a process of its own, within limits.

A tokenizer, a chat template, a model's configuration and a compressed table are programs: a few kilobytes of them can
ask for 7 GB, or for a year, and nothing in them tells that they do. So they run in a child process, which has so much
memory, so much time of a processor, and so long an answer, each growing with the bytes that go in. The child is a
fork, so that a library is imported once. It does nothing else, and ends with the process that made it.

Memory is what the child has written to beyond its parent's: the parent looks while it waits, which needs Linux. What a
library reserves and leaves alone, such as the memory of a parameter that goes to `meta`, is its own affair up to
`RESERVED`, a limit that the kernel keeps as it does that of time.

Source: https://man7.org/linux/man-pages/man2/setrlimit.2.html (RLIMIT_DATA), setitimer.2.html (ITIMER_PROF),
https://man7.org/linux/man-pages/man5/proc_pid_statm.5.html
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import resource
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn, TypeVar, cast

T = TypeVar("T")

SECONDS, MEMORY, ANSWER = 60.0, 4 << 30, 256 << 20  # of a processor, of bytes, of bytes
SECONDS_PER_BYTE, MEMORY_PER_BYTE, ANSWER_PER_BYTE = 1e-5, 256, 64
RESERVED = 128 << 30  # of bytes
BEGINS, TRIES = 20.0, 3  # seconds that a child has to begin, and how many are made
LOOK = 0.02  # seconds between two looks at the child's memory
WAITING = 20  # seconds by the clock for each of a processor: others use it, too, and disks are slow


@dataclass(frozen=True)
class Foreign:
    """A stranger's file, as far as its bounds and messages go.

    Attributes:
        name: which file it is; the beginning of a message.
        refusal: what is raised.
        fix: what to do about a file that goes beyond its bounds.
        size: its bytes.
        memory: of bytes, how many it has beside those that grow with `size`; None = `MEMORY`.
        seconds: of a processor, likewise; None = `SECONDS`.
    """

    name: str
    refusal: type[Exception]
    fix: str
    size: int = 0
    memory: int | None = None
    seconds: float | None = None

    def limits(self, given: int) -> tuple[float, int, int]:
        """Seconds of a processor, bytes of memory and bytes of an answer, with so many bytes of input."""
        size, memory = self.size + given, MEMORY if self.memory is None else self.memory
        seconds = SECONDS if self.seconds is None else self.seconds
        return (seconds + SECONDS_PER_BYTE * size, memory + MEMORY_PER_BYTE * size, ANSWER + ANSWER_PER_BYTE * size)


def in_bounds(make: Callable[[], T], foreign: Foreign) -> T:
    """Stands for what `make` gives, which a child process makes and keeps.

    It has the object's public methods, and its attributes as they are when each is first read. Arguments and results
    are pickled; of an iterator, all that it gives. One thread at a time may use it.

    Raises the file's `refusal`, here and at each use, in one line: an error of that class with its own text, and others
    and what goes beyond the bounds with the file's name and `fix`.
    """
    return cast(T, _Child(make, foreign))


def run_in_bounds(function: Callable[[], T], foreign: Foreign) -> T:
    """Call a function in a child process. Raises what `in_bounds` does."""
    return in_bounds(lambda: function, foreign)()


class _Child:
    def __init__(self, make: Callable[[], Any], foreign: Foreign) -> None:
        self._foreign, self._granted = foreign, 0
        # Python before 3.12 may fork while another thread, such as gloo's, holds a lock that the child then waits for.
        if not any(self._begins(make) for _ in range(TRIES)):
            raise foreign.refusal(f"{foreign.name}: none of {TRIES} processes for it began in {BEGINS:g} s; try again")
        self._ask("")

    def _begins(self, make: Callable[[], Any]) -> bool:
        self._pipe, theirs = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of this process's threads; the child needs none
            pid = os.fork()
        if pid == 0:
            _serve(make, theirs, self._foreign.refusal)
        theirs.close()
        self._pid, self._before = pid, _written(pid)
        self._end = weakref.finalize(self, _end, self._pipe, pid, os.getpid())
        if not self._pipe.poll(BEGINS):
            self._end()
            return False
        with suppress(EOFError, OSError):  # of one that has ended, which the first request tells
            self._pipe.recv_bytes()
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        is_method, value = self._ask(name)
        if is_method:
            return lambda *some, **named: self._ask(name, some, named)[1]
        self.__dict__[name] = value
        return value

    def __call__(self, *some: Any, **named: Any) -> Any:
        return self._ask("__call__", some, named)[1]

    def _ask(self, name: str, some: tuple[Any, ...] | None = None, named: dict[str, Any] | None = None) -> Any:
        """A pair: whether an attribute is a method, and its value; with arguments, the method's result."""
        request = pickle.dumps((name, some, named))
        seconds, memory, length = self._foreign.limits(len(request))
        # An allocator keeps for later requests what an earlier, larger one was granted.
        self._granted = memory = max(memory, self._granted)
        try:
            self._pipe.send((seconds, memory, length))
            self._pipe.send_bytes(request)
            while not self._pipe.poll(LOOK):
                if _written(self._pid) - self._before > memory:
                    os.kill(self._pid, signal.SIGKILL)
            how, answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            how, answer = _ended_by(self._end())
        except BaseException:  # of a signal: what the child answers would be taken for that to the next request
            self._end()
            raise
        if how == "made":
            return answer
        if how == "refused":
            raise self._foreign.refusal(answer)
        whys = {
            "failed": f"the library that reads it gives up ({answer})",
            "time": f"takes more than {seconds:.0f} seconds of a processor",
            "memory": f"takes more than {memory / 2**30:.1f} GiB of memory, or ends the library that reads it{answer}",
            "long": f"makes more than {length >> 20} MiB",
            "ended": "what works with it has been ended before",
        }
        given = f" ({len(request):,} bytes were given to it)" if some else ""
        raise self._foreign.refusal(f"{self._foreign.name}: {whys[how]}{given}; {self._foreign.fix}")


def _end(pipe: Connection, pid: int, owner: int) -> int | None:
    """End the child; its status. None in a copy of the process that made it, such as a loader's."""
    pipe.close()
    if os.getpid() != owner:
        return None
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _ended_by(status: int | None) -> tuple[str, str | None]:
    if status is None:
        return "ended", None
    # Without memory a library ends its process itself, or the system does.
    by_time = os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM)
    return ("time", None) if by_time else ("memory", f" (exit code {os.waitstatus_to_exitcode(status)})")


def _serve(make: Callable[[], Any], pipe: Connection, refusal: type[Exception]) -> NoReturn:
    """Answer until the other end is closed."""
    try:
        _let_go(pipe)
        pipe.send_bytes(b"begun")
        reserved, made = _pages(os.getpid(), 5) + RESERVED, None
        while True:
            seconds, memory, length = pipe.recv()
            request = pipe.recv_bytes()
            with _limits(seconds, reserved + memory):
                try:
                    name, some, named = pickle.loads(request)
                    if name:
                        answer = pickle.dumps(("made", _attribute(made, name, some, named)))
                    else:
                        made = make()
                        answer = pickle.dumps(("made", None))
                    if len(answer) > length:
                        answer = pickle.dumps(("long", None))
                except refusal as error:
                    without = isinstance(error.__context__, MemoryError)  # of which it is only another name
                    answer = pickle.dumps(("memory", "") if without else ("refused", str(error)))
                except MemoryError:
                    answer = pickle.dumps(("memory", ""))
                except BaseException as error:  # a panic of a library in Rust is no Exception
                    answer = pickle.dumps(("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"))
            pipe.send_bytes(answer)
    finally:
        os._exit(0)  # nothing that the parent would do at its end


def _attribute(made: Any, name: str, some: tuple[Any, ...] | None, named: Any) -> tuple[bool, Any]:
    value = getattr(made, name)
    if some is None:
        return callable(value), None if callable(value) else value
    value = value(*some, **named)
    return True, list(value) if isinstance(value, Iterator) else value


@contextmanager
def _limits(seconds: float, reserved: int) -> Iterator[None]:
    """Let the kernel end this process after its time, and give it no more memory than it may reserve."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WAITING)
    within = [one for one in (reserved, soft, hard) if one != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(within), hard))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
        signal.setitimer(timer, 0)


def _written(pid: int) -> int:
    """Bytes of a process that stand in no file; 0 where the system doesn't tell."""
    return _pages(pid, 1) - _pages(pid, 2)


def _pages(pid: int, field: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[field]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _let_go(pipe: Connection) -> None:
    """Leave the parent its files, locks, connections and objects, and what it does at signals."""
    faulthandler.disable()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at Ctrl-C the parent ends, and this process with it
    for number in (signal.SIGTERM, signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) != pipe.fileno():
            with suppress(OSError):  # the listing's own
                os.close(int(name))
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # where memory ends, this process goes first
        file.write("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

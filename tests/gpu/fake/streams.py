"""Streams and events that only remember what is ordered before what, in place of torch.cuda's.

Each stream counts what is issued on it, and knows how far it has waited for the others: a vector clock. An access that
isn't ordered after an earlier one of the same memory is a race, as is memory that is given back to its allocator while
another stream may still use it. Source: https://dl.acm.org/doi/10.1145/359545.359563, and what torch's
`record_stream` promises: https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Clock = dict[int, int]


def _merge(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


class Stream:
    """In place of torch.cuda.Stream."""

    _numbers = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.number, self.device, self.clock = next(self._numbers), device, Clock()
        self.stream_id, self.device_index, self.device_type, self.cuda_stream = self.number, 0, 1, self.number

    def issue(self) -> Clock:
        """One more operation; what it comes after, itself included."""
        _merge(self.clock, HOST.clock)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return dict(self.clock)

    def wait_stream(self, other: Stream) -> None:
        _merge(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        _merge(self.clock, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        HOST.wait(self.clock)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        STATE.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        STATE.streams.pop()


class Event:
    """In place of torch.cuda.Event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or current()).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current()).wait_event(self)

    def synchronize(self) -> None:
        HOST.wait(self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Host:
    """The CPU: it issues, and has waited for what `synchronize` has brought."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.waits = 0

    def wait(self, clock: Clock) -> None:
        self.waits += 1
        _merge(self.clock, clock)


class _State(threading.local):
    def __init__(self) -> None:
        self.streams = [DEFAULT]


HOST, DEFAULT = Host(), Stream()
STATE = _State()


def current(device: Any = None) -> Stream:
    return STATE.streams[-1]


def default(device: Any = None) -> Stream:
    return DEFAULT


@contextmanager
def on(stream: Stream | None) -> Iterator[None]:
    """In place of torch.cuda.stream."""
    if stream is None:
        yield
    else:
        with stream:
            yield


@dataclass
class Access:
    stream: int
    count: int
    what: str
    writes: bool

    def before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.count


@dataclass
class Memory:
    """A storage on the device: where it was allocated, who has used it, and for whom its end waits."""

    home: Stream
    accesses: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)


class Races:
    """Looks at each access of watched storages. Its `found` are lines that name both sides.

    `what` of its methods says who accesses, and is asked only where that is kept.
    """

    def __init__(self) -> None:
        self.memory: dict[int, Memory] = {}
        self.arriving: dict[int, tuple[Any, Clock, str]] = {}  # memory of the CPU's that a copy is on its way to
        self.found: list[str] = []

    def watch(self, tensor: Tensor) -> None:
        """Look at a tensor's memory from now on, until it is given back."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.memory:
            self.memory[key] = Memory(current())
            weakref.finalize(storage, self._freed, key)

    def access(self, tensor: Tensor, clock: Clock, *, what: Callable[[], str], writes: bool) -> None:
        memory = self.memory.get(tensor.untyped_storage()._cdata)
        if memory is None:
            return
        stream, name = current().number, what()
        for earlier in memory.accesses:
            if (writes or earlier.writes) and not earlier.before(clock):
                self.found.append(f"{name} doesn't wait for {earlier.what}")
        memory.accesses.append(Access(stream, clock[stream], name, writes))

    def arrives(self, tensor: Tensor, clock: Clock, *, what: Callable[[], str]) -> None:
        """A copy to the CPU has been issued that nobody waits for yet."""
        storage = tensor.untyped_storage()
        self.arriving[storage._cdata] = storage, dict(clock), what()  # kept, so that no other gets its number

    def read_by_cpu(self, tensor: Tensor, *, what: Callable[[], str]) -> None:
        _, clock, copy = self.arriving.get(tensor.untyped_storage()._cdata, (None, {}, ""))
        if any(HOST.clock.get(stream, 0) < count for stream, count in clock.items()):
            self.found.append(f"{what()} reads what {copy} hasn't brought yet")

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """What `Tensor.record_stream` promises: the tensor's memory isn't given back before the stream has used it."""
        memory = self.memory.get(tensor.untyped_storage()._cdata)
        if memory is not None:
            memory.recorded.add(stream.number)

    def _freed(self, key: int) -> None:
        memory = self.memory.pop(key)
        for one in memory.accesses:
            if one.stream not in memory.recorded and not one.before(memory.home.clock):
                self.found.append(f"memory is given back while {one.what} may use it")


@contextmanager
def replaced() -> Iterator[None]:
    """torch.cuda's streams and events, replaced."""
    names: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": current,
        "default_stream": default,
        "stream": on,
    }
    # Of a machine without a GPU: what FSDP2 and a mesh ask of the device.
    rest: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: current().synchronize(),
        "get_device_properties": lambda device=None: None,
        "get_device_capability": lambda device=None: (9, 0),
        "empty_cache": lambda: None,
        "manual_seed_all": lambda seed: None,
        "is_current_stream_capturing": lambda: False,
    }
    with (
        mock.patch.multiple(torch.cuda, **names, **rest),
        mock.patch.object(torch.accelerator, "current_stream", current),
    ):
        yield


@contextmanager
def recorded(races: Races) -> Iterator[None]:
    """`Tensor.record_stream`, told to `races`: it takes no stream but torch's own."""

    def record_stream(self: Tensor, stream: Stream) -> None:
        races.record_stream(self, stream)

    with mock.patch.object(Tensor, "record_stream", record_stream):
        yield

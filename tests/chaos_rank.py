"""The inside of `tests/chaos.py`: one rank of a run that kills itself at a chosen moment.

A module of its own, because the server that ranks are forked from imports it once, with all that a run imports
late: so a run starts in a second.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch._dynamo
import torch.distributed as dist
from tqdm import tqdm

import fsdp2.models.cnn
import fsdp2.train
from fsdp2.checkpoint import staging
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.config import parse

# A peer that has lost its partner must end by itself; this long only if it hangs, which is a failure.
PATIENCE = 60.0

CHANGES = ("write", "fsync", "rename", "unlink", "mkdir", "rmdir")
READS = ("read", "open")


@dataclass(frozen=True)
class Point:
    """Where a run is killed."""

    kind: str  # operation, step, staging
    number: int  # the how many-th of them, from 1
    rank: int
    when: str = "before"  # or after, or torn: half-way through a write
    both: bool = False  # both ranks die; else the other must notice and end
    background: bool = False  # --async-checkpoint
    resumed: bool = False  # the killed run is one that resumes


class Fuse:
    """Counts moments of a kind and kills this process at one of them."""

    def __init__(self, point: Point | None, rank: int) -> None:
        self.armed = point if point is not None and point.rank == rank else None
        self.moments: dict[str, list[str]] = {kind: [] for kind in ("operation", "step", "staging")}

    def burn(self, kind: str, what: str) -> bool:
        """Count one; whether it is the one."""
        self.moments[kind].append(what)
        point = self.armed
        return point is not None and point.kind == kind and len(self.moments[kind]) == point.number

    def around(self, kind: str, what: str, action: Any, *arguments: Any) -> Any:
        hit = self.burn(kind, what)
        if hit and self.armed and self.armed.when != "after":
            die()
        result = action(*arguments)
        if hit:
            die()
        return result


def _base(files: LocalFiles, name: str) -> str:
    return (f"{files}/{name}" if name else str(files)).rsplit("/", 1)[-1]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def install(fuse: Fuse) -> None:
    """Put the fuse into every file operation of this process, and into each copy for an asynchronous save."""

    def wrapped(name: str) -> Any:
        real = getattr(LocalFiles, name)

        def operation(self: LocalFiles, *arguments: Any) -> Any:
            return fuse.around("operation", f"{name} {_base(self, arguments[0])}", real, self, *arguments)

        return operation

    for name in (*CHANGES, *READS):
        setattr(LocalFiles, name, wrapped(name))
    create = LocalFiles.create

    def creating(self: LocalFiles, name: str) -> Any:
        what = _base(self, name)
        return Shard(fuse.around("operation", f"create {what}", create, self, name), what, fuse)

    program: Any = LocalFiles
    program.create = creating
    real_copy = staging._copy

    def copying(pairs: Any) -> None:
        for pair in pairs:
            fuse.around("staging", "copy", real_copy, [pair])

    module: Any = staging
    module._copy = copying


class Shard:
    """A new file: each write is a moment, and may be torn."""

    def __init__(self, file: BinaryIO, what: str, fuse: Fuse) -> None:
        self.file, self.what, self.fuse = file, what, fuse

    def write(self, data: Any) -> int:
        point = self.fuse.armed
        if self.fuse.burn("operation", f"data {self.what}"):
            if point is not None and point.when != "before":
                self.file.write(data if point.when == "after" else data[: len(data) // 2])
                self.file.flush()
            die()
        return self.file.write(data)

    def close(self) -> None:
        self.file.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def rank_main(rank: int, store: str, log: str, flags: list[str], point: Point | None, moments: str) -> None:
    """One rank of a run, in a process of its own."""
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process leaves behind
    fuse = Fuse(point, rank)
    install(fuse)
    timeout = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timeout)

    def on_event(kind: str, data: dict[str, Any]) -> None:
        if kind == "train":
            fuse.around("step", f"step {data['step']}", lambda: None)

    fsdp2.train.main(parse(flags), on_event)
    Path(moments).write_text(json.dumps(fuse.moments))
    dist.destroy_process_group()

"""The inside of `tests/chaos.py`: one rank of a run to which something happens at a chosen moment.

A module of its own, because the server that ranks are forked from imports it once, with all that a run imports
late: so a run starts in a second.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch._dynamo
import torch.distributed as dist
from tqdm import tqdm

import fsdp2.models.cnn
import fsdp2.train
from fsdp2.checkpoint import staging
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.config import parse
from fsdp2.run.process import ending

# A peer that has lost its partner must end by itself; this long only if it hangs, which is a failure.
PATIENCE = 60.0

# What happens to a rank: it dies, stands still for a second, or its run directory or disk is taken from it.
FAULTS = ("kill", "stop", "remove", "move", "full")
NEEDS_SPACE = ("create", "write", "data", "mkdir")

CHANGES = ("write", "fsync", "rename", "unlink", "mkdir", "rmdir")
READS = ("read", "open")


@dataclass(frozen=True)
class Point:
    """Where something happens to a run, and what."""

    kind: str  # operation, step, staging
    number: int  # the how many-th of them, from 1
    rank: int
    when: str = "before"  # or after, or torn: half-way through a write
    both: bool = False  # all ranks die; else the others must notice and end
    background: bool = False  # --async-checkpoint
    resumed: bool = False  # the run that it happens to is one that resumes
    fault: str = "kill"
    damage: str = ""  # what happens to metrics.jsonl before the run is resumed


class Fuse:
    """Counts moments of a kind and strikes at one of them."""

    def __init__(self, point: Point | None, rank: int, run: Path) -> None:
        self.armed = point if point is not None and point.rank == rank else None
        self.moments: dict[str, list[str]] = {kind: [] for kind in ("operation", "step", "staging")}
        self.run, self.disk_is_full = run, False

    def burn(self, kind: str, what: str) -> bool:
        """Count one; whether it is the one."""
        self.moments[kind].append(what)
        point = self.armed
        return point is not None and point.kind == kind and len(self.moments[kind]) == point.number

    def around(self, kind: str, what: str, action: Any, *arguments: Any) -> Any:
        hit = self.burn(kind, what)
        after = self.armed is not None and self.armed.when == "after"
        if hit and not after:
            self.strike()
        self.require_space(what)
        try:
            return action(*arguments)
        finally:  # also after one that fails, such as the reading of what isn't there
            if hit and after:
                self.strike()

    def require_space(self, what: str) -> None:
        if self.disk_is_full and what.split()[0] in NEEDS_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.run / what.split()[-1]))

    def strike(self) -> None:
        assert self.armed is not None
        fault, process = self.armed.fault, os.getpid()
        if fault == "kill":
            os.kill(process, signal.SIGKILL)
        elif fault == "stop":
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {process}"])
            os.kill(process, signal.SIGSTOP)
        elif fault == "remove":
            while self.run.exists():  # others may write into it meanwhile
                shutil.rmtree(self.run, ignore_errors=True)
        elif fault == "move":
            os.rename(self.run, moved(self.run))
        else:
            self.disk_is_full = True


def moved(run: Path) -> Path:
    """Where `move` puts a run directory."""
    return run.with_name(f"{run.name}-moved")


def _base(files: LocalFiles, name: str) -> str:
    return (f"{files}/{name}" if name else str(files)).rsplit("/", 1)[-1]


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
        point, torn = self.fuse.armed, data
        if hit := self.fuse.burn("operation", f"data {self.what}"):
            assert point is not None
            torn = data[: len(data) // 2] if point.when == "torn" else data
            if point.when != "before":
                self.file.write(torn)
                self.file.flush()
            self.fuse.strike()
        self.fuse.require_space(f"data {self.what}")
        if hit and point is not None and point.when != "before":
            self.file.write(data[len(torn) :])
            return len(data)
        return self.file.write(data)

    def close(self) -> None:
        self.file.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def rank_main(
    rank: int, world_size: int, store: str, log: str, flags: list[str], point: Point | None, moments: str
) -> None:
    """One rank of a run, in a process of its own."""
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process leaves behind
    config = parse(flags)
    fuse = Fuse(point, rank, Path(str(config.run_dir)))
    install(fuse)
    # No launcher ends this rank when rank 0 has said what is wrong.
    cast(Any, ending._ended_by_launcher).__defaults__ = (0.5,)
    timeout = timedelta(seconds=PATIENCE)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timeout
    )

    def on_event(kind: str, data: dict[str, Any]) -> None:
        if kind == "train":
            fuse.around("step", f"step {data['step']}", lambda: None)

    with ending.exit_status():
        fsdp2.train.main(config, on_event)
    Path(moments).write_text(json.dumps(fuse.moments))
    dist.destroy_process_group()

"""The sides of `checkpoint.py`: each a context that gives a function which saves a job's state into a folder."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from fsdp2.checkpoint import dcp_files
from fsdp2.checkpoint.dcp_files import HashingStream
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.saver import Saver
from fsdp2.checkpoint.state import AppState
from fsdp2.checkpoint.store import Store


@dataclass
class Pending:
    """A save that goes on while training does."""

    busy: Callable[[], bool]
    wait: Callable[[], float]  # until it is durable; when that was, by time.perf_counter


Save = Callable[[Path], Pending | None]  # None: it was durable when the call returned


@dataclass
class Job:
    """A sharded model in training, and how long its optimizer's steps have waited for a save's copies."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    app: AppState
    device: torch.device
    inputs: torch.Tensor
    waited: float = field(default=0.0)
    _began: float = field(default=0.0)

    def __post_init__(self) -> None:
        # Hooks run in the order in which they were registered: this one before every side's, `clocked` after.
        self.optimizer.register_step_pre_hook(lambda *_: self._before_waiting())

    def _before_waiting(self) -> None:
        self._wait_for_stream()  # so that what the GPU has still to do isn't counted
        self._began = time.perf_counter()

    def _after_waiting(self) -> None:
        self._wait_for_stream()
        self.waited += time.perf_counter() - self._began

    def _wait_for_stream(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # and not the device: copies have a stream of their own

    @contextmanager
    def clocked(self) -> Iterator[None]:
        handle = self.optimizer.register_step_pre_hook(lambda *_: self._after_waiting())
        yield
        handle.remove()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self) -> None:
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class Side:
    name: str
    open: Callable[[Job], AbstractContextManager[Save]]
    keeps_buffers: bool = False  # so that its first save is slower than all others


def sides(device: torch.device) -> list[Side]:
    gpu = device.type == "cuda"
    return [
        Side("dcp.save", dcp_save),
        Side("ours", ours),
        Side("ours, asynchronous", partial(ours, background=True), True),
        Side("dcp.async_save", dcp_async_save),
        Side("dcp.async_save, kept stager", partial(dcp_async_save, options=_staging(gpu, thread=False)), True),
        Side(
            "dcp.async_save, kept stager in a thread", partial(dcp_async_save, options=_staging(gpu, thread=True)), True
        ),
        *([Side("torch_checkpointing", torch_checkpointing, True)] if has_torch_checkpointing() else []),
        Side("ours, nothing hashed", partial(ours, stream=UnhashedStream)),
        Side("ours, nothing synced", partial(ours, files=UnsyncedFiles)),
    ]


def _staging(gpu: bool, *, thread: bool) -> StagingOptions:
    return StagingOptions(
        use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=thread, use_non_blocking_copy=gpu
    )


def has_torch_checkpointing() -> bool:
    return importlib.util.find_spec("torch_checkpointing") is not None


class NoHash:
    def update(self, data: Any) -> None:
        """Do nothing: the measurement is what this would have cost."""

    def hexdigest(self) -> str:
        return ""


class UnhashedStream(HashingStream):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._digest: Any = NoHash()


class UnsyncedFiles(LocalFiles):
    def create(self, name: str) -> BinaryIO:
        return open(self._path(name), "xb")

    def fsync(self, name: str) -> None:
        """Do nothing: the measurement is what this would have cost."""


@contextmanager
def ours(
    job: Job,
    *,
    background: bool = False,
    files: type[LocalFiles] = LocalFiles,
    stream: type[HashingStream] = HashingStream,
) -> Iterator[Save]:
    saver = Saver(Store(files("")), job.app, job.device, keep=1, background=background)
    vars(dcp_files)["HashingStream"] = stream

    def save(folder: Path) -> Pending | None:
        saver.store = Store(files(folder))
        began = time.perf_counter()
        ended = saver.save(1, {})
        if ended is not None and ended.error is not None:
            raise ended.error
        return Pending(lambda: saver.busy, lambda: began + end()) if background else None

    def end() -> float:
        ended = saver.wait()
        assert ended is not None
        if ended.error is not None:
            raise ended.error
        return ended.seconds

    try:
        yield save
        saver.close()
    finally:
        vars(dcp_files)["HashingStream"] = HashingStream


@contextmanager
def dcp_save(job: Job) -> Iterator[Save]:
    def save(folder: Path) -> None:
        dcp.save({"app": job.app}, storage_writer=dcp.FileSystemWriter(folder))

    yield save


@contextmanager
def dcp_async_save(job: Job, options: StagingOptions | None = None) -> Iterator[Save]:
    """With a stager that is kept from one save to the next, or the one that torch makes each time."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    stager = None if options is None else DefaultStager(options)
    staging: list[Future[Any]] = []

    def save(folder: Path) -> Pending:
        writer = dcp.FileSystemWriter(folder)
        answer = dcp.async_save({"app": job.app}, storage_writer=writer, process_group=group, async_stager=stager)
        if isinstance(answer, AsyncSaveResponse):
            staging.append(answer.staging_completion)
            return pending(answer.upload_completion)
        return pending(answer)

    def wait_for_copies(*_: Any) -> None:
        while staging:
            staging.pop().result()

    hook = job.optimizer.register_step_pre_hook(wait_for_copies)
    yield save
    hook.remove()
    if stager is not None:
        stager.close()
    dist.destroy_process_group(group)


@contextmanager
def torch_checkpointing(job: Job) -> Iterator[Save]:
    """The settings that its own pages give for hosts without a GPU."""
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
    from torch_checkpointing.config import AsyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    gpu = job.device.type == "cuda"
    staging = CheckpointStagerConfig(use_pinned_memory=gpu, use_non_blocking_copy=gpu)
    config = CheckpointManager.Config(
        save=AsyncCheckpointSaverConfig(
            staging_config=staging,
            process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=300),  # importing torch is slow
        ),
        default=ItemSpec(resharder=DefaultResharder() if gpu else None),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        # It never syncs. Its own extension points make it as durable as the others.
        pre_finalize_callback=partial(_sync_files, dist.get_rank()),
        finalize_callback=partial(_sync_folder, dist.get_rank()),
    )
    manager = CheckpointManager(config)

    def wait_for_copies(*_: Any) -> None:
        with manager.lock():
            pass

    def save(folder: Path) -> Pending:
        future = manager.save(str(folder), job.app.state_dict())
        assert future is not None
        return pending(future)

    hook = job.optimizer.register_step_pre_hook(wait_for_copies)
    yield save
    hook.remove()
    manager.close()


def _sync_files(rank: int, arguments: Any) -> None:
    """In the process that writes for a rank: sync that rank's files, and on rank 0 what no rank has in its name."""
    for path in Path(arguments.path).iterdir():
        if path.stem.endswith(f"_{rank}") or (rank == 0 and path.suffix != ".pt"):
            LocalFiles(path.parent).fsync(path.name)
    LocalFiles(arguments.path).fsync("")


def _sync_folder(rank: int, arguments: Any) -> None:
    if rank == 0:
        LocalFiles(Path(arguments.path).parent).fsync("")


def pending(future: Future[Any]) -> Pending:
    ended, at = threading.Event(), [0.0]

    def end(_: Future[Any]) -> None:
        at[0] = time.perf_counter()
        ended.set()

    def wait() -> float:
        future.result()
        ended.wait()  # a future wakes those who wait for it before it calls back
        return at[0]

    future.add_done_callback(end)
    return Pending(lambda: not future.done(), wait)

"""Saving as a collective operation: at once, or in the background with one save in flight.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from fsdp2.checkpoint.dcp_files import ShardWriter
from fsdp2.checkpoint.files import NotTheWriter
from fsdp2.checkpoint.state import AppState, is_finite
from fsdp2.checkpoint.store import Store
from fsdp2.checkpoint.together import raised_on_all

if TYPE_CHECKING:
    from fsdp2.checkpoint.staging import Staging


class SaveFailed(RuntimeError):
    """A save that did not become a checkpoint; those committed before it are as they were."""

    for_good = False  # whether no later save of this run can succeed either


@dataclass
class Outcome:
    """The end of a save."""

    step: int
    seconds: float  # from the call to the commit
    stall_seconds: float  # of them, how long the call kept training waiting
    error: SaveFailed | None = None


class Saver:
    """Saves an AppState into a store. Every method is called by all ranks of a group after the same steps.

    In the background, a save has a gloo group of its own: on the training group its collectives would mix with
    those of training, and the two would wait for each other. One save is in flight at a time.

    Once a checkpoint is committed, a thread of rank 0 removes old ones, while training goes on. It is done before the
    next save begins to write, and when `close` returns.
    """

    def __init__(
        self,
        store: Store,
        app: AppState,
        device: torch.device,
        *,
        keep: int,
        keep_every: int | None = None,
        keep_best: bool = False,
        background: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`group`: of the ranks that save, nobody else's and of gloo; None is all ranks."""
        self.store, self.app, self._kept = store, app, (keep, keep_every, keep_best)
        self._in_flight: Future[Outcome] | None = None
        self._removal: Future[None] | None = None
        self._not_removed: deque[str] = deque()
        self._planner = _new_planner()
        self._staging: Staging | None = None
        self._group, self._is_own = group, False
        # One thread, so that what it is given happens in that order. CUDA's current device is each thread's own: in
        # a new one it is GPU 0, where streams and pinned copies of all ranks would meet.
        use_gpu = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save", initializer=use_gpu)
        if background:
            from fsdp2.checkpoint.staging import Staging

            if group is None:
                own = dist.new_group(backend="gloo")
                assert isinstance(own, dist.ProcessGroup)  # and not the constant for ranks that aren't in it
                self._group, self._is_own = own, True
            self._staging = Staging(app.optimizer, device)

    def save(
        self,
        step: int,
        info: Mapping[str, Any],
        still_ours: Callable[[], None] = lambda: None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> Outcome | None:
        """Save the state as it is now on all ranks, commit it, and only then remove old ones. A collective call.

        Args:
            info: what the marker says beside step, world size and files.
            still_ours: raises NotTheWriter if this run has lost the place. Rank 0 calls it before anything is
                written, before the commit and before old checkpoints are removed, every rank when a file operation
                has failed.
            before_commit: runs on rank 0 when all shards are durable; if it raises, nothing is committed.

        Each rank writes, hashes and syncs its shards; rank 0 commits when it has heard from all of them, and no
        rank's save ends before that. An error is the same on every rank, with the cause, if any of them failed.

        Returns how it ended; None if it goes on in the background. An earlier save must have ended: see `wait`.
        """
        began = time.perf_counter()
        commit = partial(self.store.commit, step, info={**info, "world_size": dist.get_world_size()})
        files, begin = self.store.checkpoint(step), partial(self.store.begin, step)
        writer = ShardWriter(files, begin, commit, still_ours, before_commit)
        if self._staging is None:
            self.wait_for_removal()
            outcome = self._write(self.app, step, writer, began)
            self.app.release()
            return outcome
        assert self._in_flight is None, "one save at a time: wait for the one in flight"
        staged = self._staging.copy(self.app.state_dict())
        self.app.release()
        stall = time.perf_counter() - began
        self._in_flight = self._thread.submit(self._write, staged, step, writer, began, stall)
        return None

    def _write(self, state: Any, step: int, writer: ShardWriter, began: float, stall: float | None = None) -> Outcome:
        error = None if self._staging is None else self._staging_failed(self._staging, step)
        if error is None:
            planner = self._planner(enable_plan_caching=True)
            try:
                dcp.save({"app": state}, storage_writer=writer, planner=planner, process_group=self._group)
            except CheckpointException as failure:
                error = self._failed(step, failure)
        seconds = time.perf_counter() - began
        if error is None and dist.get_rank(self._group) == 0:
            self._removal = self._thread.submit(self._remove_old, step, writer.still_ours)
        return Outcome(step, seconds, seconds if stall is None else stall, error)

    def _failed(self, step: int, error: CheckpointException) -> SaveFailed:
        causes = "; ".join(f"rank {rank}: {_one_line(cause)}" for rank, (cause, _) in sorted(error.failures.items()))
        failure = SaveFailed(f"step {step} was not saved to {self.store.files}: {causes}")
        failure.for_good = any(isinstance(cause, NotTheWriter) for cause, _ in error.failures.values())
        failure.__cause__ = error
        self._planner = _new_planner()
        return failure

    def _remove_old(self, step: int, still_ours: Callable[[], None]) -> None:
        try:
            still_ours()
            self.store.retain(*self._kept)
        except NotTheWriter:
            return  # the next save fails because of it, and so does the end of the run
        except OSError as error:
            self._not_removed.append(f"step {step} is saved, but old checkpoints could not be removed: {error}")

    def wait_for_removal(self) -> None:
        """Return when old checkpoints are removed, of which the last save began to remove some."""
        if self._removal is not None:
            self._removal.result()

    def not_removed(self) -> list[str]:
        """The reasons why old checkpoints could not be removed, on rank 0, as far as they are known; each once."""
        return [self._not_removed.popleft() for _ in range(len(self._not_removed))]

    def _staging_failed(self, staging: Staging, step: int) -> SaveFailed | None:
        """Finish the copies, on all ranks; what went wrong with them, the same on every rank."""

        def told(error: Exception) -> SaveFailed:
            return SaveFailed(f"rank {dist.get_rank()}: {error!r}")

        try:
            with raised_on_all(Exception, as_=told, group=self._group):  # whatever it is, or others wait for ever
                staging.finish()
        except SaveFailed as error:
            return SaveFailed(f"step {step} was not copied for saving: {error}")
        return None

    @property
    def busy(self) -> bool:
        """Return whether a save of this rank is still being written; ranks may differ for a moment."""
        return self._in_flight is not None and not self._in_flight.done()

    def ended(self) -> Outcome | None:
        """The save in flight, if it has ended since the last call."""
        return None if self._in_flight is None or self.busy else self.wait()

    def wait(self) -> Outcome | None:
        """Wait for the save in flight and return how it ended; None if there is none."""
        if self._in_flight is None:
            return None
        future, self._in_flight = self._in_flight, None
        return future.result()

    def close(self) -> None:
        """After the last save has ended; returns when old checkpoints are removed."""
        self._thread.shutdown()
        self.wait_for_removal()
        if self._staging is not None:
            self._staging.close()
        if self._is_own:
            dist.destroy_process_group(self._group)


def save_now(store: Store, app: AppState, step: int, *, keep: int, info: Mapping[str, Any] | None = None) -> None:
    """One save of the state on all ranks, which is a checkpoint when this returns. A collective call.

    Args:
        keep: how many of the newest checkpoints stay.
        info: what the marker says beside step, world size and files.

    Raises SaveFailed on every rank if it isn't, and before anything is written if weights are NaN or infinite.
    """
    with raised_on_all(SaveFailed, as_=lambda error: error):
        if not is_finite(app.model.parameters()):
            raise SaveFailed(f"step {step} wasn't saved to {store.files}: its weights hold NaN or infinity")
    saver = Saver(store, app, torch.device("cpu"), keep=keep)  # only a save in the background needs the device
    ended = saver.save(step, info or {})
    saver.close()
    assert ended is not None
    if ended.error is not None:
        raise ended.error
    for text in saver.not_removed():
        warnings.warn(text, stacklevel=2)


_planners = itertools.count()


def _new_planner() -> type[DefaultSavePlanner]:
    """A class of planners that share their plans from save to save, and with no other Saver.

    The ranks send rank 0 the plans that have changed since the last save, and it merges plans only then. Torch keeps
    them for the whole process by the name of the planner's class. After a failed save the name must be new: rank 0 may
    have noted plans that the ranks never got, and these would look for them in vain.
    """
    return type(f"SavePlanner{next(_planners)}", (DefaultSavePlanner,), {})


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[-1] if text else 'no message'}"

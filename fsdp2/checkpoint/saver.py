"""The saves of one run: at once, or in the background with one in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.checkpoint.save import SaveFailed, save
from fsdp2.checkpoint.staging import Staging
from fsdp2.checkpoint.state import AppState
from fsdp2.checkpoint.store import Store


@dataclass
class Saved:
    """A save that has ended."""

    step: int
    seconds: float  # from the call to the commit
    stall_seconds: float  # of them, how long the call kept training waiting
    error: SaveFailed | None = None
    warning: str | None = None  # on rank 0: why old checkpoints could not be removed


class Saver:
    """Saves an AppState into a store. Every method is called by all ranks after the same steps.

    In the background, a save has a gloo group of its own: on the training group its collectives would mix with
    those of training, and the two would wait for each other. One save is in flight at a time.
    """

    def __init__(
        self,
        store: Store,
        app: AppState,
        device: torch.device,
        *,
        keep: int,
        keep_every: int | None = None,
        background: bool = False,
    ) -> None:
        self.store, self.app, self.keep, self.keep_every = store, app, keep, keep_every
        self._in_flight: Future[Saved] | None = None
        self._staging: Staging | None = None
        if background:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)  # and not the constant for ranks that aren't in it
            self._group = group
            self._staging = Staging(app.optimizer, device)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")

    def save(
        self,
        step: int,
        info: Mapping[str, Any],
        still_ours: Callable[[], None] = lambda: None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> Saved | None:
        """Save the state as it is now; the functions are those of `save`. A collective call.

        Returns how it ended; None if it goes on in the background. An earlier save must have ended: see `wait`.
        """
        began = time.perf_counter()
        if self._staging is None:
            saved = self._save(self.app, step, info, still_ours, before_commit, began, None)
            self.app.release()
            return saved
        assert self._in_flight is None, "one save at a time: wait for the one in flight"
        staged = self._staging.copy(self.app.state_dict())
        stall = time.perf_counter() - began
        self._in_flight = self._thread.submit(self._save, staged, step, info, still_ours, before_commit, began, stall)
        return None

    def _save(
        self,
        state: Any,
        step: int,
        info: Mapping[str, Any],
        still_ours: Callable[[], None],
        before_commit: Callable[[], None],
        began: float,
        stall: float | None,
    ) -> Saved:
        group = None
        error: SaveFailed | None = None
        warning = None
        if self._staging is not None:
            group = self._group
            error = self._staging_failed(step)
        if error is None:
            try:
                warning = save(
                    self.store,
                    state,
                    step,
                    info=info,
                    keep=self.keep,
                    keep_every=self.keep_every,
                    still_ours=still_ours,
                    before_commit=before_commit,
                    group=group,
                )
            except SaveFailed as failure:
                error = failure
        seconds = time.perf_counter() - began
        return Saved(step, seconds, seconds if stall is None else stall, error, warning)

    def _staging_failed(self, step: int) -> SaveFailed | None:
        """Finish the copies, on all ranks; what went wrong with them, the same on every rank."""
        assert self._staging is not None
        problem = None
        try:
            self._staging.finish()
        except Exception as error:  # whatever it is, the other ranks must hear of it or wait for ever
            problem = f"rank {dist.get_rank()}: {error!r}"
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem, group=self._group)
        found = [text for text in problems if text]
        return SaveFailed(f"step {step} was not copied for saving: {'; '.join(found)}") if found else None

    @property
    def busy(self) -> bool:
        """Whether a save of this rank is still being written; ranks may differ for a moment."""
        return self._in_flight is not None and not self._in_flight.done()

    def ended(self) -> Saved | None:
        """The save in flight, if it has ended since the last call."""
        return None if self._in_flight is None or self.busy else self.wait()

    def wait(self) -> Saved | None:
        """Wait for the save in flight and return how it ended; None if there is none."""
        if self._in_flight is None:
            return None
        future, self._in_flight = self._in_flight, None
        return future.result()

    def close(self) -> None:
        """After the last save has ended."""
        if self._staging is not None:
            self._thread.shutdown()
            self._staging.close()
            dist.destroy_process_group(self._group)

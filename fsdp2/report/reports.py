"""All listeners of a run behind one `emit`, opened and closed together."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp2.checkpoint.files import Files
from fsdp2.config import Config
from fsdp2.options.checks import trackers_of
from fsdp2.options.own_model import code_flags
from fsdp2.options.parser import to_flags
from fsdp2.report import PLAN
from fsdp2.report.console import Console
from fsdp2.report.metrics import MetricsFile, OnEvent, StepLog, peak_memory_bytes

if TYPE_CHECKING:
    from fsdp2.report.planned import Planned

WARM_UP = 2  # steps that no plan is about: caches fill, and gradients get their memory


class Reports:
    """The metrics file, the console, the trackers asked for, and the launcher's listener if there is one.

    Leaving it with an error writes a `failure` event.

    Attributes:
        plan: the run's, if it has one, or a line about one that can't be used.
    """

    def __init__(
        self,
        config: Config,
        metrics: Path,
        files: Files,
        rank: int,
        world_size: int,
        steps_per_epoch: int,
        on_event: OnEvent | None,
    ) -> None:
        """`metrics`: where the metrics file is, in the run directory; `files`: the directory's, maybe at a URL."""
        self.rank = rank
        self.plan: Planned | str | None = None
        if files.size(PLAN) is not None:
            from fsdp2.report import planned

            self.plan = planned.read(config, world_size)
        self._step_ms: list[float] = []
        self._open = ExitStack()
        words = code_flags(config), code_flags(config, reads_copy=True)
        export = ("hf" if config.lora is None else "peft") if config.model.startswith("hf:") else ""
        self.console = Console(rank, steps_per_epoch, config.epochs, config.max_steps, *words, export)
        self.metrics = MetricsFile(metrics, rank)
        self._open.callback(self.metrics.close)
        self._listeners: list[OnEvent] = [self.metrics, self.console]
        if rank == 0 and (names := trackers_of(config)):
            from fsdp2_extra.trackers.listeners import Run, Trackers, run_id

            kept = run_id(files, fresh=config.resume == "never" or config.resume_partial)
            tags = dict(one.split("=", 1) for one in config.tag)
            run = Run(kept, config.run_name, tags, to_flags(config), metrics.parent)
            trackers = Trackers(names, run, self.console.line)
            self._open.callback(trackers.close)
            self._listeners.append(trackers)
        if on_event is not None:
            self._listeners.append(on_event)

    def emit(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "train":
            self._step_ms.append(data["step_ms"])
        for listener in self._listeners:
            listener(kind, data)

    def last_words(self, error: str) -> None:
        """Write a `failure` to the metrics file alone, from any thread, before this process ends at once."""
        self.metrics("failure", {"rank": self.rank, "error": error})

    def position(self, *, durable: bool = True) -> int:
        """Bytes of the metrics file, durable when this returns; 0 on ranks that don't write it."""
        return self.metrics.position(durable=durable)

    def last_steps(self, count: int) -> list[dict[str, Any]]:
        """The newest `train` records of the metrics file; [] on ranks that don't write it."""
        return self.metrics.last_steps(count)

    def end(self, data: dict[str, Any], log: StepLog, tensors: Callable[[], int | None]) -> dict[str, Any]:
        """Emit the `end` event: `data`, and what was measured since this was entered. Returns it.

        If there is a plan, the console has it beside what was measured.

        Args:
            tensors: the most bytes of this rank's tensors; None if nobody has counted.
        """
        end = {
            **data,
            "seconds": time.perf_counter() - self._started,
            "nonfinite_steps": log.nonfinite,
            "peak_memory_bytes": peak_memory_bytes(log.device),
        }
        if self.rank == 0 and self.plan is not None and not isinstance(self.plan, str):
            self.console.lines(self.plan.beside(tensors(), self._step_ms[WARM_UP:]))
        self.emit("end", end)
        return end

    def __enter__(self) -> Reports:
        self._started = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            with self._open:
                if error is not None:
                    self.emit("failure", {"rank": self.rank, "error": repr(error)})
        except OSError as unwritten:
            if error is None:
                raise
            error.add_note(f"the failure could not be reported: {unwritten}")  # nor may that hide it

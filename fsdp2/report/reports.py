"""All listeners of a run behind one `emit`, opened and closed together."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

from fsdp2.config import Config
from fsdp2.report.console import Console
from fsdp2.report.metrics import MetricsFile, OnEvent, TensorBoard
from fsdp2.run.rundir import RunDir
from fsdp2.run.runtime import World


class Reports:
    """The metrics file, the console, TensorBoard if asked for, and the launcher's listener if there is one.

    Leaving it with an error writes a `failure` event.
    """

    def __init__(
        self, config: Config, run: RunDir, world: World, steps_per_epoch: int, on_event: OnEvent | None
    ) -> None:
        self.world = world
        self._open = ExitStack()
        self.console = Console(world.rank, steps_per_epoch, config.epochs)
        self.metrics = MetricsFile(run.metrics, world.rank)
        self._open.callback(self.metrics.close)
        self._listeners: list[OnEvent] = [self.metrics, self.console]
        if config.tensorboard:
            board = TensorBoard(run.path / "tensorboard", world.rank)
            self._open.callback(board.close)
            self._listeners.append(board)
        if on_event is not None:
            self._listeners.append(on_event)

    def emit(self, kind: str, data: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener(kind, data)

    def __enter__(self) -> Reports:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._open:
                if error is not None:
                    self.emit("failure", {"rank": self.world.rank, "error": repr(error)})
        except OSError as unwritten:
            if error is None:
                raise
            error.add_note(f"the failure could not be reported: {unwritten}")  # nor may that hide it

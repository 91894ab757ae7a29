"""Ctrl-C, SIGTERM and SIGUSR1 ask a run to save and end. All ranks must do so after the same step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """While entered, remembers a stop signal instead of dying from it.

    `received` is this rank's view. The training loop sums it over the ranks together with the loss, so that
    all of them learn of it at the same step: a rank that stopped alone would leave the others waiting in a
    collective. torchrun passes a Ctrl-C on to ranks that have had it from the terminal already, so a second
    signal means nothing new.
    """

    def __init__(self) -> None:
        self.received: int = 0  # the signal's number
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        # Python allows handlers in the main thread alone; elsewhere the launcher owns the signals.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._remember)
        return self

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

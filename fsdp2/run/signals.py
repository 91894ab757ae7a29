"""Ctrl-C, SIGTERM and SIGUSR1 ask a run to save and end, and so does the death of the launcher.

All ranks must do so after the same step.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from fsdp2.run.runtime import gather, launcher_gone

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
LAUNCHER_GONE = "the launcher (torchrun) has gone"


class StopSignals:
    """While entered, remembers a stop signal instead of dying from it.

    `reason` is this rank's view. The training loop sums it over the ranks together with the loss, so that
    all of them learn of it at the same step: a rank that stopped alone would leave the others waiting in a
    collective. A second signal means nothing new: torchrun passes one on that a rank may have had already.
    """

    def __init__(self) -> None:
        self._received: int = 0  # the signal's number
        self._before: dict[int, Any] = {}

    @property
    def reason(self) -> str | None:
        """Why this rank wants to stop: that the launcher has gone, or a signal's name; None to go on."""
        if launcher_gone():
            return LAUNCHER_GONE
        return signal.Signals(self._received).name if self._received else None

    def agreed(self) -> str:
        """The reason of the first rank that has one, the same on every rank. A collective call."""
        return next(reason for reason in gather(self.reason) if reason)

    def __enter__(self) -> StopSignals:
        # Python allows handlers in the main thread alone; elsewhere the launcher owns the signals.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._remember)
        return self

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # torchrun sends SIGTERM to all ranks as soon as one has failed, and this one has yet to say why it ends.
            if error is None or number != signal.SIGTERM:
                signal.signal(number, handler)

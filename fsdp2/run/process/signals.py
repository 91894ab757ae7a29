"""Ctrl-C, SIGTERM and SIGUSR1 ask a run to save and end, and so does the death of the launcher.

All ranks must do so after the same step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fsdp2.run.process.group import gather
from fsdp2.run.process.runtime import World, launcher_gone, of_torchrun, restarts_allowed

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
LAUNCHER_GONE = "the launcher (torchrun) has gone"
ELSEWHERE = ", on another node"
SECONDS_APART = 5.0  # in which torchruns hear of a node that comes


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
        """The reason why this rank wants to stop: the launcher has gone, or a signal's name; None to go on."""
        if launcher_gone():
            return LAUNCHER_GONE
        return signal.Signals(self._received).name if self._received else None

    def agreed(self, world: World) -> str:
        """The reason of the first rank of this node that has one, else of any rank. A collective call."""
        node = world.rank - world.local_rank
        found = [(its_node, reason) for its_node, reason in gather((node, self.reason)) if reason]
        own = [reason for its_node, reason in found if its_node == node]
        return own[0] if own else found[0][1] + ELSEWHERE

    @contextmanager
    def early(self) -> Iterator[None]:
        """Remember SIGUSR1, which asks for a save alone, before there is a step; the others end a run that starts."""
        before = self._handled(signal.SIGUSR1)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handled(self, *numbers: int) -> dict[int, Any]:
        # Python allows handlers in the main thread alone; elsewhere the launcher owns the signals.
        is_main = threading.current_thread() is threading.main_thread()
        return {number: signal.signal(number, self._remember) for number in numbers if is_main}

    def __enter__(self) -> StopSignals:
        self._before = self._handled(*SIGNALS)
        return self

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        for number, handler in self._before.items():
            # torchrun sends SIGTERM to all ranks as soon as one has failed, and this one has yet to say why it ends.
            if error is None or number != signal.SIGTERM:
                signal.signal(number, handler)


def fails_to_torchrun(reason: str) -> bool:
    """Return whether this process must fail, so that torchrun, with --max-restarts, starts the ranks again here.

    To torchrun status 0 is the end of the training on all nodes, and a signal to another node alone isn't that. To take
    in a node torchrun sends SIGTERM on each, on some later than on others. This waits for it, since a failure would
    cost a restart. SIGUSR1 goes to ranks alone: where nothing is started again, it ends the training.
    """
    if reason.startswith(LAUNCHER_GONE):
        return True
    if reason.endswith(ELSEWHERE) and of_torchrun():
        if not restarts_allowed() and reason.startswith(signal.SIGUSR1.name):
            return False
        time.sleep(SECONDS_APART)
        return True
    return False

"""The console of a run through Ray: rank 0's lines as under torchrun, and of Ray what one can act on.

Imported by each process that Ray starts, so it imports nothing heavy itself.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
from collections.abc import Iterator
from typing import TextIO

# Ray writes "(RayTrainWorker pid=123) " or "(RayTrainWorker pid=123, ip=10.0.0.2) " before each line of a worker.
_PREFIX = re.compile(r"(?:\x1b\[\d+m)?\((?P<who>\w+)[^)]*\)(?:\x1b\[0m)? ")
_NOISE = (
    # An actor of Ray's own, which it doesn't mean to restart: https://github.com/ray-project/ray/issues/53727
    "Actor with class name: 'PreemptionWatcher'",
    # Said each second by a helper of Ray's that looks for a dashboard, where two clusters run on one machine.
    "Found multiple active Ray instances",
    # Pages of counters in the last words of a node that was lost; its log has them.
    "[state-dump]",
)
_ALL_IS_WELL = (
    "ray.train.v2._internal.execution.controller.placement_group_cleaner",
    # It asks for nodes that are there already, and gives up after 5 s, in which a slow machine has not yet started
    # the process that it asks.
    "ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client",
)


def quiet() -> None:
    """In each process that Ray starts: keep what says that all is well, or that there is no dashboard, to its log."""
    for name in _ALL_IS_WELL:
        # A filter, since Ray Train sets the levels of its loggers later, by its own LoggingConfig.
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)
    if "ray.train.v2._internal.execution.context" in sys.modules:
        # Named by its file: each report would be a line for each rank.
        file = sys.modules["ray.train.v2._internal.execution.context"].__file__
        logging.getLogger(file).setLevel(logging.WARNING)


@contextlib.contextmanager
def plain_lines() -> Iterator[None]:
    """Let the lines of workers appear without Ray's prefix while entered."""
    out, error = PlainLines(sys.stdout), PlainLines(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            yield
        finally:
            out.flush_rest()
            error.flush_rest()


class PlainLines(io.TextIOBase):
    """Passes lines on to a stream, less Ray's prefix and less what nobody can act on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._rest = stream, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if not any(noise in line for noise in _NOISE):
                self._stream.write(_PREFIX.sub("", line, count=1) + "\n")
        self._stream.flush()
        return len(text)

    def flush_rest(self) -> None:
        if self._rest:
            self._stream.write(_PREFIX.sub("", self._rest, count=1))
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

"""The output of tools: what they say while they work, and the files that they leave.

Each file is there whole, in the place of what had its name, and never behind a link.
"""

from __future__ import annotations

import io
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from fsdp2.checkpoint.files import LocalFiles, publish
from fsdp2.options.errors import ConfigError
from fsdp2.run.directory.lock import new_folder
from fsdp2.run.directory.marker import environment
from fsdp2.units import tell


def clock(stream: TextIO | None = None) -> Callable[[str], None]:
    """A function that prints a line to a stream, stdout by default, after the seconds since this call."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", file=stream, flush=True)

    return say


def facts(command: str, ranks: int) -> dict[str, Any]:
    """The command, the date and the environment of what a tool measures."""
    return {"command": command, "date": time.strftime("%Y-%m-%d"), **environment(ranks)}


def folder(out: str | Path | None, flag: str = "--out", below: str = ".") -> Path:
    """A folder for results; if none is named a new one `below` another, by the time, also for the second in a second.

    Raises ConfigError, before anything is measured, if nothing can be written there.
    """
    place = Path(f"{below}/{time.strftime('%Y%m%d-%H%M%S')}" if out is None else out)
    with _explained(place, flag):
        place = new_folder(place.absolute()) if out is None else place
        place.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    return place


@contextmanager
def sigterm_exits(told: str = "") -> Iterator[None]:
    """SIGTERM ends the body as Ctrl-C does, so that what it has made is removed. `told`: printed then."""

    def end(number: int, frame: object) -> None:
        if told:
            tell(told)
        sys.exit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()  # no other has handlers
    before = signal.signal(signal.SIGTERM, end) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def temporary(below: Path | None = None) -> Iterator[Path]:
    """A folder for the time of the body, which SIGTERM ends, too."""
    with sigterm_exits("stopped by SIGTERM"), tempfile.TemporaryDirectory(dir=below) as folder:
        yield Path(folder)


def write(path: Path, content: str | bytes, flag: str = "--out") -> None:
    """Write a file. Raises ConfigError with the flag that its place was given by."""
    # A stranger's name may hold half of a surrogate pair, which no encoding has.
    raw = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    with _explained(path, flag):
        publish(LocalFiles(path.parent), path.name, raw)


def pyplot() -> Any:
    """matplotlib's, for figures that no window shows. It is imported here, since it takes a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def picture(figure: Any, path: Path, dpi: int = 110) -> None:
    """Write a figure as PNG, and close it."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=dpi)
    pyplot().close(figure)
    write(path, drawn.getvalue())


@contextmanager
def _explained(place: Path, flag: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{flag} {place}: can't be written ({why}); choose a folder that can") from None

"""A library reads a stranger's folder, and nothing that the folder names is run or fetched.

transformers, tokenizers, peft and timm take names from a folder's files: of classes beside them, of other repositories
on the hub, of kernels. Each has an option against it, and each release adds a way. So the names aren't looked for here:
an audit hook sees what Python is about to execute and which connection it is about to open, and refuses.

Source: https://docs.python.org/3/library/audit_events.html, https://peps.python.org/pep-0578/
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any


class ForeignCode(ValueError):
    """A folder asks for code that isn't installed, or for a connection. The message is one line without a fix."""


class _Door:
    """The rules of a region. `refused` was asked for in vain: a library may catch the refusal and go on."""

    def __init__(self, folder: str) -> None:
        self.refused: list[str] = []
        self._closed = {os.path.realpath(folder), *_fetched()}
        self._installed = _roots()  # now, and not later: a library may put what it fetches on Python's path

    def require_installed(self, file: str) -> None:
        """Raise ForeignCode unless the innermost known folder of a file is one of what is installed."""
        if file.startswith("<") or not os.path.exists(file):  # made by a program that runs, or frozen into Python
            return
        if not self._knows(os.path.realpath(file)):
            self.refused.append(f"a file in it names code that isn't installed ({os.path.basename(file)})")
            raise ForeignCode(self.refused[-1])

    def _knows(self, path: str) -> bool:
        while (above := os.path.dirname(path)) != path:
            if above in self._closed:
                return False
            if above in self._installed:
                return True
            path = above
        return False


_door: ContextVar[_Door | None] = ContextVar("_door", default=None)


@contextmanager
def installed_code_only(folder: Path | str, *, trusted: bool = False) -> Iterator[None]:
    """Let a library read `folder`: what isn't installed isn't run, and no connection is opened.

    Installed is what Python finds on its path, below its own prefix, or where a package lies that is imported already.
    What lies in `folder`, and what a library has fetched from the hub, is not, wherever that is.

    Args:
        trusted: the user has asked for the folder's code by name. The region changes nothing then.

    Raises ForeignCode at the first attempt, and at the end of the region if a library has hidden the attempt to run
    code. This thread only; not a sandbox: a program that runs already can do what it likes.
    """
    if trusted:
        yield
        return
    _install_hook()
    door = _Door(str(folder))
    token = _door.set(door)
    try:
        yield
    except Exception as error:
        if door.refused and not isinstance(error, ForeignCode):
            raise ForeignCode(door.refused[0]) from error
        raise
    finally:
        _door.reset(token)
    if door.refused:
        raise ForeignCode(door.refused[0])


@cache  # once a process: a hook can't be taken off
def _install_hook() -> None:
    sys.addaudithook(_look)


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    door = _door.get()
    if door is None:
        return
    if event == "exec" and isinstance(arguments[0], CodeType):
        door.require_installed(arguments[0].co_filename)
    elif event == "import" and arguments[1]:  # of a compiled module, its file
        door.require_installed(str(arguments[1]))
    elif event in ("socket.getaddrinfo", "socket.connect"):
        raise ForeignCode("a file in it names something that would have to be fetched from a network")


def _fetched() -> set[str]:
    """Folders in which huggingface_hub and transformers keep what they fetch, and the modules that they run."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    own = [os.environ.get(name) for name in ("HF_HUB_CACHE", "HF_MODULES_CACHE")]
    own.append(getattr(sys.modules.get("transformers.utils.hub"), "HF_MODULES_CACHE", None))
    return {os.path.realpath(path) for path in (home, *own) if path}


def _roots() -> set[str]:
    """Folders of what is installed: Python's path and prefix, and where imported packages lie."""
    paths = {*sys.path, *sysconfig.get_paths().values(), sys.prefix, sys.base_prefix}
    files = [getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if "." not in name]
    found = {os.path.realpath(path) for path in paths | {os.path.dirname(file) for file in files if file} if path}
    fetched = _fetched()  # transformers puts the folder of what it has fetched on Python's path
    return {path for path in found if not any(f"{path}/".startswith(f"{one}/") for one in fetched)}

"""The file operations of the store, in one small object that a test can replace.

`LocalFiles` is a folder; `RemoteFiles`, of `fsdp2_extra.remote`, is a prefix on an object store. Both name what is in
them relative to themselves, and refuse names that lead out: a stranger's checkpoint brings its own names.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

_LONGEST_NAME = 255  # bytes; no common file system has more


class Unreachable(OSError):
    """A place where an operation failed again and again. It says nothing about what is there."""


class NotAFile(OSError):
    """Something else is where a file, or a checkpoint's folder, belongs: a folder, a device, what no memory holds."""


class NotTheWriter(RuntimeError):
    """Another run has this place, or may have it."""


class Files(Protocol):
    """Files below one place. Names are relative, with `/`; "" is the place itself."""

    # Whether `write` replaces a file in one step that readers see as a whole or not at all, and that is
    # durable when it returns: an object store's put. A local file system has only `rename` for that.
    put_is_atomic: bool

    def at(self, name: str) -> Files:
        """The files below `name`."""

    def create(self, name: str) -> BinaryIO:
        """Open a new file for writing. Raises FileExistsError."""

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading, seekable. Raises FileNotFoundError, or NotAFile, and never waits for a pipe."""

    def write(self, name: str, content: bytes) -> None:
        """Write a small file whole."""

    def read(self, name: str) -> bytes:
        """Read a small file whole. Raises as `open` does, and NotAFile for what no memory holds."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if nothing has that name. Raises NotAFile for what isn't one."""

    def fsync(self, name: str) -> None:
        """Make a file's content, or a folder's entries, survive a power cut."""

    def rename(self, source: str, target: str) -> None:
        """Rename a file, replacing `target`, or a folder."""

    def unlink(self, name: str) -> None:
        """Delete a file. Raises FileNotFoundError."""

    def mkdir(self, name: str) -> None:
        """Make a folder and those above it, durable when it returns; it may exist."""

    def rmdir(self, name: str) -> None:
        """Delete an empty folder."""

    def list(self, name: str) -> list[str]:
        """Names in a folder, sorted; none if it doesn't exist."""

    def folders(self, name: str) -> Sequence[str]:
        """Those of them that are folders themselves, and no links to one."""


def inside(name: str) -> str:
    """`name` itself, if it stays inside. Raises ValueError for an absolute name or one with `..`."""
    if name.startswith("/") or "\\" in name or ".." in name.split("/") or "\0" in name:
        raise ValueError(f"{name!r} leads out of the checkpoint; it was not followed")
    return name


def file_name(name: str) -> str:
    """`name` itself, if a file in a checkpoint's folder can be called so. Raises ValueError."""
    inside(name)
    # A lone surrogate, which no encoding has, isn't printable either.
    if name in ("", ".") or "/" in name or not name.isprintable() or len(name.encode()) > _LONGEST_NAME:
        rule = f"1 to {_LONGEST_NAME} printable bytes without a slash"
        raise ValueError(f"{name[:80]!r} can't be the name of a file in its folder ({rule})")
    return name


def is_there(files: Files, name: str) -> bool:
    """Return whether something has that name, a file or not."""
    try:
        return files.size(name) is not None
    except NotAFile:
        return True


def size_of(files: Files, name: str) -> int | None:
    """Bytes of a file; None for a folder, for what is no file, and for nothing."""
    try:
        return files.size(name)
    except NotAFile:
        return None


sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has only the latter


class EagerFile(io.BufferedWriter):
    """A new file that goes to the disk while it is being written.

    By itself the kernel begins that only after many seconds, and the `fsync` that counts, at the end, would wait for
    all of it while the disk has stood still until then.
    """

    BYTES = 64 << 20

    def __init__(self, path: Path) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._syncing: Future[None] | None = None
        self._unsynced = 0
        super().__init__(io.FileIO(path, "xb"))

    def write(self, data: Any) -> int:
        """Write all of the data, and send full blocks to the disk at once."""
        count = super().write(data)
        self._unsynced += count
        if self._unsynced >= self.BYTES and (self._syncing is None or self._syncing.done()):
            self._check()
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="sync")
            self._syncing = self._thread.submit(sync_data, self.fileno())
            self._unsynced = 0
        return count

    def _check(self) -> None:
        # The kernel tells of a failed write once. If nobody listened, the later `fsync` would say that all is well.
        if self._syncing is not None:
            self._syncing.result()

    def close(self) -> None:
        """Send what is left to the disk and close the file; not a sync."""
        if self._thread is not None:
            self._thread.shutdown()
        super().close()
        self._check()


_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


def _what_is_at(path: Path) -> NotAFile | None:
    """The error for what a path holds in place of a file; None for a file, and for nothing."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return NotAFile(f"{path} is a link to nothing") if path.is_symlink() else None
    except NotADirectoryError:
        return None
    except OSError as error:
        return NotAFile(f"{path} is a link that leads to itself") if error.errno == errno.ELOOP else None
    kind = next((name for is_it, name in _KINDS.items() if is_it(mode)), None)
    return None if kind is None else NotAFile(f"{path} is {kind} and no file")


def _plainly(path: str, flags: int) -> int:
    """Open what is a file, for writing: a link is not followed, and a pipe's reader not waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


class LocalFiles:
    """Files of a folder on a local or shared file system."""

    put_is_atomic = False

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def __str__(self) -> str:
        return str(self.root)

    def _path(self, name: str) -> Path:
        return self.root / inside(name)

    def at(self, name: str) -> LocalFiles:
        return type(self)(self._path(name))

    def create(self, name: str) -> BinaryIO:
        return cast(BinaryIO, EagerFile(self._path(name)))

    def open(self, name: str) -> BinaryIO:
        path = self._path(name)
        try:
            # Not blocking: opening a pipe would wait for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _what_is_at(path) or error from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _what_is_at(path) or NotAFile(f"{path} is no file")
        return os.fdopen(descriptor, "rb")

    def write(self, name: str, content: bytes) -> None:
        with open(self._path(name), "wb", opener=_plainly) as file:
            file.write(content)

    def read(self, name: str) -> bytes:
        try:
            with self.open(name) as file:
                return file.read()
        except MemoryError:
            raise NotAFile(f"{self._path(name)} is larger than the memory that is free") from None

    def size(self, name: str) -> int | None:
        path = self._path(name)
        if (problem := _what_is_at(path)) is not None:
            raise problem
        try:
            return path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def fsync(self, name: str) -> None:
        descriptor = os.open(self._path(name), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        os.replace(self._path(source), self._path(target))

    def unlink(self, name: str) -> None:
        os.unlink(self._path(name))

    def mkdir(self, name: str) -> None:
        path = self._path(name)
        parent = type(self)(path.parent)
        if not path.parent.is_dir():
            parent.mkdir("")
        path.mkdir(exist_ok=True)
        # Also if it exists: whoever made it may have died before this line.
        parent.fsync("")

    def rmdir(self, name: str) -> None:
        os.rmdir(self._path(name))

    def list(self, name: str) -> list[str]:
        path = self._path(name)
        return sorted(os.listdir(path)) if path.is_dir() else []

    def folders(self, name: str) -> Sequence[str]:
        path = self._path(name)
        return [one for one in self.list(name) if (path / one).is_dir() and not (path / one).is_symlink()]


def publish(files: Files, name: str, content: bytes) -> None:
    """Write a small file so that it exists whole or not at all, whatever happens, and is durable on return."""
    if files.put_is_atomic:
        files.write(name, content)
        return
    aside = name + ".tmp"
    files.write(aside, content)
    # Content before name: a rename may become durable before what it names.
    files.fsync(aside)
    # What the content vouches for must be durable before it: entries written earlier in this folder.
    files.fsync("")
    files.rename(aside, name)
    files.fsync("")

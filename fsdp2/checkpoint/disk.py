"""A disk that is full, limited, read-only or broken: found behind the errors that it causes, and put into words."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fsdp2.checkpoint.files import Files, LocalFiles
from fsdp2.units import size

DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}
RIGHTS = {errno.EPERM, errno.EACCES}  # of a file, where the error names one


class DiskError(OSError):
    """A disk's error in one line: what it is, on which file system, what was to be written, and what is free."""


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it was caused by or happened in the handling of."""
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [other for other in (one.__context__, one.__cause__) if other is not None]


def explained(error: BaseException, place: str | Path | Files, needed: int | None = None) -> DiskError | None:
    """The disk's error behind another one, in words; None if no disk is the cause.

    torch, for one, fails with an error of its own about a file's position when a write has failed.

    Args:
        place: a path, existing or not, or the files that were being written.
        needed: bytes that were to be written there.
    """
    errors = [one for one in chain(error) if isinstance(one, OSError)]
    known = (one for one in errors if one.errno in DISK_ERRORS or (one.errno in RIGHTS and one.filename))
    found = next(known, None)
    if found is None or isinstance(found, DiskError):
        return found
    assert found.errno is not None
    if not isinstance(place, (str, Path)):
        # Files of an object store are collected in a temporary folder.
        place = place.root if isinstance(place, LocalFiles) else temporary_folder()
    what = f"this user may not use {found.filename}, " if found.errno in RIGHTS else ""
    return DiskError(found.errno, f"{os.strerror(found.errno)}: {what}{_facts(found.errno, Path(place), needed)}")


def _facts(code: int, path: Path, needed: int | None) -> str:
    path = path.resolve()
    mount = next(one for one in (path, *path.parents) if os.path.ismount(one))
    facts = [f"the file system is {mount}"]
    if needed is not None:
        facts.append(f"{size(needed)} were to be written")
    try:
        state = os.statvfs(mount)
    except OSError:
        return ", ".join(facts)
    facts.append(f"{size(state.f_bavail * state.f_frsize)} are free")
    if code == errno.ENOSPC and state.f_files and not state.f_favail:
        facts.append("no more files can be made (no inode is left)")
    elif code == errno.EDQUOT:
        facts.append("this user's quota is used up (`quota -s`)")
    elif code == errno.EFBIG:
        facts.append("a file may not be larger (`ulimit -f`, or the file system's own limit)")
    return ", ".join(facts)


def file_system(folder: Path) -> str:
    """The kind of file system that a folder lies on, `ext4` say; "" where the system doesn't tell, as macOS."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    above = [(len(place), kind) for place, kind in mounts if folder.resolve().is_relative_to(place)]
    return max(above)[1] if above else ""


def temporary_folder() -> str:
    """The folder for a file as large as a shard until it is uploaded: $TMPDIR, as it is, or else one on a disk.

    On many machines /tmp is memory, and a rank's shards would be in it a second time. Then it is /var/tmp. Raises
    OSError if that is memory too, or can't be written to: who means it sets TMPDIR.
    """
    if os.environ.get("TMPDIR"):
        return tempfile.gettempdir()
    for folder in (tempfile.gettempdir(), "/var/tmp"):
        if file_system(Path(folder)) not in ("tmpfs", "ramfs") and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise OSError(f"{tempfile.gettempdir()} and /var/tmp lie in memory or can't be written to; set TMPDIR to a folder")


def bytes_of(tree: Any) -> int:
    """Bytes of the tensors in dicts and lists."""
    if isinstance(tree, Tensor):
        return tree.nbytes
    values = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    return sum(map(bytes_of, values))


@contextmanager
def disk_errors(place: str | Path | Files, needed: int | None = None) -> Iterator[None]:
    """Raise a disk's error in the body, also one that another error hides, as DiskError."""
    try:
        yield
    except Exception as error:
        found = explained(error, place, needed)
        if found is None or found is error:
            raise
        raise found from error

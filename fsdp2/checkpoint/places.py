"""From where something is to the object that reads and writes it."""

from __future__ import annotations

from pathlib import Path

from fsdp2.checkpoint.files import Files, LocalFiles


def open_files(place: str | Path) -> Files:
    """The files of a folder, or of a prefix on an object store if `place` is a URL.

    Raises ValueError for a URL that can't be used, ImportError naming the extra that it needs.
    """
    if "://" not in str(place):
        return LocalFiles(place)
    from fsdp2_extra.remote.files import RemoteFiles  # here: a local run needs no fsspec

    return RemoteFiles(str(place))

"""Files of a folder that a run keeps a copy of, because they decide what its weights mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

MOST_KEPT = 256 << 20  # bytes of a file; tokenizers have at most some 40 MB


def files_to_keep(folder: Path, patterns: Sequence[str], named: Path | None = None) -> list[Path]:
    """The files of a folder that match the patterns; one that the user has `named` may be a link to anywhere.

    Raises ValueError for what a run can't keep: no regular file, a link out of its folder, no settings, or too much.
    """
    found = [file for pattern in patterns for file in sorted(folder.glob(pattern)) if not file.is_dir()]
    for file in found:
        require_small(file)
        if file != named and not stays(file, folder.resolve()):
            raise ValueError(f"{file}: is a link out of the folder, and each run keeps it; put its content there")
        if file.name.endswith("_config.json") and not _is_table(file):  # of config.json its reader says more
            raise ValueError(f"{file}: is no table of settings; mend it, or remove it")
    return found


def _is_table(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_bytes()), dict)
    except (ValueError, RecursionError):
        return False


def require_small(file: Path) -> None:
    """Raise ValueError for what waits when it is read, has no end, or more than any tokenizer's file has."""
    if not file.is_file():
        raise ValueError(f"{file}: is no regular file; put a copy of its content there")
    if file.stat().st_size > MOST_KEPT:
        raise ValueError(f"{file}: has more than {MOST_KEPT >> 20} MiB, and each run keeps it; move it away")


def stays(file: Path, folder: Path) -> bool:
    """Return whether a file lies in a folder, or where the hub's cache has what its snapshots link to."""
    blobs = [folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else []
    return any(place in file.resolve().parents for place in (folder, *blobs))

"""What vouches for a full-model.pt: the marker that `save_full` writes beside it, last."""

from __future__ import annotations

from pathlib import Path

from fsdp2.checkpoint.files import LocalFiles, is_there
from fsdp2.checkpoint.store import MARKER, read_marker, verify


def vouched_step(file: Path) -> int | None:
    """The step of which a marker beside the file says that it is, after the file's hash was compared.

    None if there is no marker, or it doesn't list the file: it may be of any step, and may be damaged. Raises
    DamagedCheckpoint if the file isn't as it was saved, or the marker can't be read.
    """
    folder = LocalFiles(file.parent)
    if not is_there(folder, MARKER):
        return None
    marker = read_marker(folder)
    if file.name not in marker["files"]:
        return None
    verify(folder, [file.name])
    return int(marker["step"])


def verdict(step: int | None) -> str:
    """`vouched_step`'s answer in words."""
    return "unverified, since no marker beside it lists it" if step is None else f"verified, step {step}"

"""What a run has left, for whoever started it."""

from __future__ import annotations

from fsdp2.checkpoint.files import Files, NotAFile
from fsdp2.report.console import short
from fsdp2.units import size


def artifacts(files: Files) -> list[str]:
    """What a run has left, with sizes: one line for each file and folder, none for hidden files."""
    lines = [f"artifacts in {short(str(files))}:"]
    for name in files.list(""):
        if not name.startswith("."):
            lines += _entry(files, name)
    return lines


def _entry(files: Files, name: str) -> list[str]:
    count = _bytes(files, name)
    if count is not None:
        return [f"  {name}  {size(count)}"]
    inside = [f"{name}/{entry}" for entry in files.list(name)]
    if name in ("checkpoints", "full_model"):
        return [line for entry in inside for line in _entry(files, entry)]
    sizes = [_bytes(files, entry) or 0 for entry in inside]
    return [f"  {name}/  {len(sizes)} files, {size(sum(sizes))}"]


def _bytes(files: Files, name: str) -> int | None:
    """Bytes of a file; None for a folder, and for what is no file."""
    try:
        return files.size(name)
    except NotAFile:
        return None

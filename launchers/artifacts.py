"""The files that a run has left, for whoever started it."""

from __future__ import annotations

from fsdp2.checkpoint.files import Files, size_of
from fsdp2.units import short, size


def artifacts(files: Files) -> list[str]:
    """List the files that a run has left, with sizes: one line for each file and folder, none for hidden files."""
    lines = [f"artifacts in {short(str(files))}:"]
    for name in files.list(""):
        if not name.startswith("."):
            lines += _entry(files, name)
    return lines


def _entry(files: Files, name: str) -> list[str]:
    count = size_of(files, name)
    if count is not None:
        return [f"  {name}  {size(count)}"]
    inside = [f"{name}/{entry}" for entry in files.list(name)]
    if name in ("checkpoints", "full_model"):
        return [line for entry in inside for line in _entry(files, entry)]
    sizes = [size_of(files, entry) or 0 for entry in inside]
    return [f"  {name}/  {len(sizes)} files, {size(sum(sizes))}"]

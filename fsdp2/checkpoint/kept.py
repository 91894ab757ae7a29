"""Files that decide what weights mean, such as config.json and a tokenizer's: a marker has their hashes.

A run keeps them in its folder `model/`, beside its checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.store import MARKER, new_hash

PART = "kept"  # of a marker


def hashes(files: Mapping[str, bytes]) -> dict[str, str]:
    """The part of a marker for files by name."""
    return {name: new_hash(content).hexdigest() for name, content in sorted(files.items())}


def others(marker: Mapping[str, Any], files: Mapping[str, bytes]) -> list[str]:
    """Names of files that were added, are gone or have changed since; none if an earlier version wrote the marker."""
    if PART not in marker:
        return []
    then, now = marker[PART], hashes(files)
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


def require_kept(marker: Mapping[str, Any], files: Mapping[str, bytes], folder: str) -> None:
    """Raise Refused if files of a run's folder aren't those that it wrote."""
    if found := others(marker, files):
        raise Refused(
            f"{folder}/{found[0]}: isn't as it was when the weights were saved, by its hash in {MARKER}; put back what "
            "the run wrote there"
        )

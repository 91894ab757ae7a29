"""Files that decide what weights mean, such as config.json and a tokenizer's: a marker has their hashes.

A run keeps them in its folder `model/`, beside its checkpoints. What `--tokenizer` gave is in `tokenizer/`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from fsdp2.checkpoint.files import Files
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.store import MARKER, new_hash

PART = "kept"  # of a marker
CONFIG = "config.json"  # of a folder's model: equal shapes may be other heads
TOKENIZER = "tokenizer"  # the folder, and the part of a marker


def hashes(files: Mapping[str, bytes]) -> dict[str, str]:
    """The part of a marker for files by name."""
    return {name: new_hash(content).hexdigest() for name, content in sorted(files.items())}


def others(marker: Mapping[str, Any], files: Mapping[str, bytes], part: str = PART) -> list[str]:
    """Names of files that were added, are gone or have changed since; none if the marker lacks the part.

    The marker of an earlier version has no part, and that of a run without `--tokenizer` none for its files.
    """
    if part not in marker:
        return []
    then, now = marker[part], hashes(files)
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


def require_kept(marker: Mapping[str, Any], files: Mapping[str, bytes], folder: str, part: str = PART) -> None:
    """Raise Refused if files of a run's folder aren't those that it wrote."""
    if found := others(marker, files, part):
        raise Refused(
            f"{folder}/{found[0]}: isn't as it was when the weights were saved, by its hash in {MARKER}; put back what "
            "the run wrote there"
        )


def replace(files: Files, contents: Mapping[str, bytes], ours: Callable[[str], bool]) -> None:
    """Let a folder hold these files, and no others of names that are `ours`. Several ranks may do it at once."""
    before = set(names(files))
    for name in filter(ours, before - contents.keys()):
        with suppress(FileNotFoundError):
            files.unlink(name)
    for name, content in contents.items():
        if name in before and files.read(name) == content:
            continue  # another rank may be reading it
        files.mkdir("")
        if "/" in name:
            files.mkdir(name.rpartition("/")[0])
        aside = name if files.put_is_atomic else f"{name}.{os.getpid()}.tmp"
        files.write(aside, content)
        if aside != name:
            files.rename(aside, name)


def names(files: Files) -> Iterator[str]:
    """The paths of files in a folder and in those below it."""
    folders = files.folders("")
    for name in files.list(""):
        if name in folders:
            yield from (f"{name}/{below}" for below in files.list(name))
        elif not name.endswith(".tmp"):
            yield name

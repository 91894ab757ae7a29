"""Files of a run at a URL that lie on this machine, too: its full model, which it uploads, and what is read there."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any, cast

from fsdp2.checkpoint import meaning
from fsdp2.checkpoint.dcp_files import HashingStream
from fsdp2.checkpoint.files import Files, LocalFiles, publish
from fsdp2.checkpoint.store import MARKER, DamagedCheckpoint, read_marker, verify
from fsdp2.options.errors import ConfigError, shown
from fsdp2_extra.foreign import model_files


def upload_full_model(here: LocalFiles, there: Files) -> None:
    """Copy the files that a folder's marker lists, and the marker last."""
    if there.size(MARKER) is not None:
        there.unlink(MARKER)
    for name in read_marker(here)["files"]:
        with here.open(name) as source, there.create(name) as target:
            shutil.copyfileobj(source, target, 1 << 20)
    there.write(MARKER, here.read(MARKER))


def lacking(here: LocalFiles, there: Files, name: str) -> dict[str, Any] | None:
    """The marker of a full model that isn't here as it is there; None if it is. Raises DamagedCheckpoint, OSError."""
    marker = read_marker(there)
    with suppress(DamagedCheckpoint):
        if read_marker(here) == marker:
            verify(here, [name])
            return None
    return marker


def fetch_full_model(here: LocalFiles, there: Files, name: str, marker: Mapping[str, Any]) -> None:
    """Copy a full model, with the marker that vouches for it, into a folder that nobody else writes to.

    Raises DamagedCheckpoint if it isn't as its marker says, and OSError.
    """
    here.mkdir("")
    for old in (MARKER, aside := f"{name}.tmp"):
        if here.size(old) is not None:
            here.unlink(old)
    with there.open(name) as source, HashingStream(here.create(aside)) as target:
        shutil.copyfileobj(source, cast(IO[bytes], target), 1 << 20)
    if target.fingerprint() != marker["files"].get(name):
        raise DamagedCheckpoint(f"{there}: {name} differs from what was committed")
    here.rename(aside, name)
    publish(here, MARKER, there.read(MARKER))


def fetch_tokenizer(here: LocalFiles, there: Files) -> bool:
    """Copy the tokenizer that a run keeps; False if it keeps none. Raises ConfigError for files that no run keeps."""
    try:
        names = list(meaning.names(there))
        if large := [name for name in names if (there.size(name) or 0) > model_files.MOST_KEPT]:
            raise ValueError(f"{shown(large[0])} has more than {model_files.MOST_KEPT >> 20} MiB; remove it there")
        files = {name: there.read(name) for name in names}
    except ValueError as error:  # a name that leads elsewhere, too
        raise ConfigError(f"{there}: {error}") from None
    if files:
        here.root.parent.mkdir(parents=True, exist_ok=True)
        meaning.replace(here, files, lambda name: True)
    return bool(files)

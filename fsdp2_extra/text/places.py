"""The places of text: the files of a path, a folder or a pattern, and names of what the library `datasets` reads."""

from __future__ import annotations

import glob
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from fsdp2.data.errors import UnusableText
from fsdp2_extra.foreign.model_files import stays

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
PUBLISHED, HUB = "datasets:", "hf://datasets/"  # before a place that `datasets` reads, and before a name on the hub


# Between the sources of a mixture.
_BETWEEN = re.compile(r",(?=(?:text|chat|datasets):)")


@dataclass(frozen=True)
class File:
    """A file as it was when it was found.

    Attributes:
        name: an absolute path.
        size: in bytes.
        state: another one when the content is another one, as far as the file system tells.
    """

    name: str
    size: int
    state: str

    @property
    def suffix(self) -> str:
        """See `suffix_of`."""
        return suffix_of(self.name)

    def open(self) -> BinaryIO:
        """The file from its beginning. Raises UnusableText if it has changed since it was found."""
        self.require_unchanged()
        return open(self.name, "rb")

    def require_unchanged(self) -> None:
        """Raises UnusableText if the file isn't the one that was listed."""
        if _on_disk(Path(self.name)) != self:
            raise UnusableText(f"{self.name}: has changed while it was read; start again when it stays as it is")


def sources(name: str) -> list[tuple[str, float]]:
    """The sources of a `--dataset` of one's own, and the share of each in a mixture; of one alone it is 1.

    Where no share is given each is 0, for as many sequences as a source has. Raises ValueError if some have none.
    """
    parts = _BETWEEN.split(name)
    if len(parts) == 1 or os.path.exists(os.path.expanduser(name.partition(":")[2])):
        return [(name, 1.0)]
    shares = [_number(part.rpartition("@")[2]) if "@" in part else None for part in parts]
    if not any(share is not None for share in shares):
        return [(part, 0.0) for part in parts]
    found = []
    for part, number in zip(parts, shares, strict=True):
        if number is None or not 0 < number < math.inf:
            fix = "write it as text:PATH@0.7,chat:PATH@0.3, or without a share for each"
            raise ValueError(f"is a mixture, in which {part} has no share; {fix}")
        found.append((part.rpartition("@")[0], number))
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def absolute(name: str) -> str:
    """A `--dataset` of one's own with absolute paths, which mean the same wherever a run is resumed from.

    Raises ValueError for one that names no file.
    """

    def one(source: str) -> str:
        kind, _, rest = source.partition(":")
        if f"{kind}:" == PUBLISHED and rest:
            return PUBLISHED + published(rest)
        places = listed(rest)
        if not all(places):
            raise ValueError(f"names no file; give {kind}:PATH")
        return f"{kind}:" + ",".join(
            one if "://" in one else os.path.abspath(os.path.expanduser(one)) for one in places
        )

    found = sources(name)
    if len(found) == 1:
        return one(name)
    return ",".join(one(source) + (f"@{share!r}" if share else "") for source, share in found)


def listed(place: str) -> list[str]:
    """The paths, patterns or folders of a place, which commas separate unless a path with them exists."""
    return [place] if os.path.exists(os.path.expanduser(place)) else place.split(",")


def with_split(place: str) -> tuple[str, str]:
    """A place, and the split that it names behind a colon, "" for none. A path that exists is itself."""
    path, _, split = place.rpartition(":")
    named = bool(path) and not os.path.exists(place) and re.fullmatch(r"\w[\w.-]*", split)
    return (path, split) if named else (place, "")


def published(place: str) -> str:
    """A place that `datasets` reads, in the form that means the same everywhere: OWNER/NAME on the hub, if there is no
    such path and the name is none of a file, is a URL."""
    path, split = with_split(place)
    if "://" not in path:
        here = os.path.abspath(os.path.expanduser(path))
        is_name = re.fullmatch(r"[\w.-]*\w/\w[\w.-]*", path) and not suffix_of(path)
        path = HUB + path if is_name and not os.path.exists(here) else here
    return f"{path}:{split}" if split else path


def suffix_of(name: str) -> str:
    """`.txt` of a path, in small letters."""
    return PurePosixPath(name).suffix.lower()


def find(place: str, suffixes: tuple[str, ...] = SUFFIXES) -> list[File]:
    """The files of a place, in order: those of each that it lists.

    Raises UnusableText if there are none, or of a kind that isn't read.
    """
    found: list[File] = []
    for one in listed(place):
        if "://" in one:
            raise UnusableText(f"{one}: is a URL, and text is read from files; give it as {PUBLISHED}{one}")
        files = below(Path(os.path.expanduser(one)), suffixes)
        if not files:
            raise UnusableText(f"{one}: there is no file of text ({', '.join(suffixes)})")
        found += files
    if strange := next((file.name for file in found if file.suffix not in suffixes), None):
        own, alone = f"; give it as {PUBLISHED}PATH", "; give it alone, or as a source of its own: chat:A.json,chat:B"
        fix = {".json": alone, ".arrow": own, ".csv": own}.get(suffix_of(strange), "")
        raise UnusableText(f"{strange}: isn't of a type that is read here: {', '.join(suffixes)}{fix}")
    return found


def below(path: Path, suffixes: tuple[str, ...]) -> list[File]:
    """A folder's files, a file, or those of a pattern: as much of a path as exists is none. Raises UnusableText."""
    there = next(one for one in (path, *path.parents) if os.path.exists(one))
    if there == path and os.path.isdir(path):
        below = (file for file in path.rglob("*") if suffix_of(file.name) in suffixes)
        # A pipe would never end; a link to nothing is refused below.
        found = sorted((file for file in below if file.is_file() or not file.exists()), key=str)
        found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        if out := next((file for file in found if not stays(file, path.resolve())), None):
            raise UnusableText(f"{out}: is a link out of the folder; name the file that it leads to, or put it there")
    else:
        matching = glob.glob(str(path.relative_to(there)), root_dir=there, recursive=True)
        found = [
            file for file in ([path] if there == path else map(there.joinpath, sorted(matching))) if file.is_file()
        ]
    return [_on_disk(file.absolute()) for file in found]


def _on_disk(path: Path) -> File:
    try:
        facts = path.stat()
    except OSError as error:
        raise UnusableText(f"{path}: can't be read ({error.strerror})") from None
    # Who copies a file may set its date of change; that of its entry is the file system's own.
    return File(str(path), facts.st_size, f"{facts.st_mtime_ns} {facts.st_ctime_ns}")

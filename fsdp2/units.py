"""Bytes, places, commands and notices as a person writes and reads them."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def size(count: float) -> str:
    """Bytes in the unit that a person would use: 8.1 MB, of a million bytes each."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def printable(text: str, keep: str = "") -> str:
    """Names come from strangers: nothing in them, but for what is kept, may move the cursor or colour the screen."""
    return "".join(one if one.isprintable() or one in keep else repr(one)[1:-1] for one in text)


def install(extra: str) -> str:
    """The command that installs an extra. The package is in no index, and its name there may be a stranger's."""
    return f"in the clone of this repository, pip install -e '.[{extra}]'"


MOST_BYTES = 10**18  # a million terabytes


def byte_count(value: object) -> int:
    """The inverse: `500MB`, `1.5 GB`, `2GiB` or a plain number. Raises ValueError."""
    is_huge = isinstance(value, int) and abs(value) > MOST_BYTES  # Python writes out no number of thousands of digits
    match = re.fullmatch(
        r"([0-9]*\.?[0-9]+)\s*(?:([kMGT]?)(i?)B?)", "" if is_huge else str(value)[:40], re.IGNORECASE | re.ASCII
    )
    count = 0.0
    if match is not None:
        count = float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " ")
    if not 1 <= count <= MOST_BYTES:
        raise ValueError("must be a number of bytes such as 500MB or 2GiB, and at most 1000000TB")
    return int(count)


def short(path: Path | str) -> str:
    """A path relative to where the user stands, if it lies below; a URL as it is."""
    if "://" in str(path):
        return str(path)
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def tell(notice: str) -> None:
    """Print a notice of the program's own, apart from its results."""
    print(f"fsdp2: {notice}", file=sys.stderr, flush=True)

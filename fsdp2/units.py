"""Bytes as a person writes and reads them."""

from __future__ import annotations

import re


def size(count: float) -> str:
    """Bytes in the unit that a person would use: 8.1 MB, of a million bytes each."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def byte_count(value: object) -> int:
    """The inverse: `500MB`, `1.5 GB`, `2GiB` or a plain number. Raises ValueError."""
    match = re.fullmatch(r"([0-9.]+)\s*(?:([kMGT]?)(i?)B?)", str(value), re.IGNORECASE)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or number <= 0:
        raise ValueError("must be a number of bytes such as 500MB or 2GiB")
    base = 1024 if match[3] else 1000
    return int(number * base ** "kmgt".index(match[2].lower()) * base) if match[2] else int(number)

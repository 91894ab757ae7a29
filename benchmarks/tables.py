"""Parts that the pages of all benchmarks share."""

from __future__ import annotations

import os
import re
import statistics
from pathlib import Path


def spread(values: list[float], digits: int = 3) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def lines_of(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    names = [line for line in lines_of("/proc/cpuinfo") if line.startswith("model name")] or [": unknown processor"]
    return f"{names[0].partition(':')[2].strip()}, {os.cpu_count()} cores, {memory:.0f} GiB of memory"


def write_page(path: Path, text: str) -> None:
    """Replace a page as a whole: who is interrupted while writing leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    os.replace(new, path)


def write_within(path: Path, *texts: str, like: Path | None = None) -> None:
    """Write a page whose text stands in it, but for what lies between each `<!-- measured -->` and `<!-- end -->`.

    Args:
        like: the page whose other text it gets; unset = that of before.
    """
    parts = re.split("(<!-- measured -->\n|<!-- end -->)", (like or path).read_text())
    if len(parts) != 4 * len(texts) + 1:
        raise ValueError(f"{path}: has other than {len(texts)} pairs of <!-- measured --> and <!-- end -->")
    parts[2::4] = [f"\n{text}\n\n" for text in texts]
    write_page(path, "".join(parts))

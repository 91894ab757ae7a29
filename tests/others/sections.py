"""Parts of a page, such as docs/models.md, that programs of their own write, between two marks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def kept(name: str) -> str:
    """A part of the page as it stands, for the program that writes the rest."""
    begin, end = _marks(name)
    _, _, rest = PAGE.read_text().partition(begin)
    return f"{begin}{rest.partition(end)[0]}{end}"


def put(page: str, name: str, lines: Sequence[str]) -> str:
    """The page with these lines as one of its parts."""
    begin, end = _marks(name)
    before, _, rest = page.partition(begin)
    return "\n".join([before + begin, *lines, "", end]) + rest.partition(end)[2]

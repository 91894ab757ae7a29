"""Refusals of what a stranger has named or written: one printable line of bounded length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdp2.units import printable


class Refused(ValueError):
    """Something can't be read, written or compared. The message is one line that says why, and what to do."""


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


# Longer than any refusal of ours; what is repeated of a name or a value can be of any length.
LONGEST_REFUSAL = 1200


def refusal(text: str) -> str:
    """One printable line of bounded length: what is wrong stands at its start, and the fix at its end."""
    line, half = printable(text), LONGEST_REFUSAL // 2
    return line if len(line) <= LONGEST_REFUSAL else f"{line[:half]} … {line[-half:]}"


def without_links(folder: Path) -> None:
    """Raise Refused for a link in a folder that a run keeps, of which a tool makes copies: it may lead anywhere."""
    for file in folder.glob("*"):
        if file.is_symlink():
            raise Refused(f"{file}: is a link, which no run makes; remove it, or put its content there")


def empty_word(words: Sequence[str]) -> str | None:
    """The flag that a command line gives an empty value, as it stands there; None if there is none."""
    for before, word in zip(["", *words], words, strict=False):
        flag, equals, value = word.partition("=") if word.startswith("--") else (before, "", word)
        if not value and (equals or not word):
            return f'{flag} ""'.lstrip()
    return None


def is_name(text: str) -> bool:
    """Return whether a file or folder can be called so: `""` can't, nor text with a NUL or a byte that isn't UTF-8."""
    try:
        return bool(text) and b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False

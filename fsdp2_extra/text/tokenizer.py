"""Text to token numbers and back, and which tokens begin and end a document."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from fsdp2.data.errors import UnusableText
from fsdp2_extra.foreign.model_files import require_small

if TYPE_CHECKING:
    from fsdp2_extra.foreign.bounds import Foreign


LOOKED_AT = 256  # documents, and tokens of each, that are compared with what transformers makes of them


class Tokenizer(Protocol):
    """Turns text into tokens.

    Attributes:
        size: one more than its largest token.
        identity: says which tokenizer it is; two that differ have two.
        begin: the tokens that begin a document, () if none does.
        end: the token that ends a document, if it has one.
        about: for a reader: which `tokenizer` it is, the texts that it `begins` and `ends` a document with, and what of
            its file's settings is `off`; and which tokens were `added` to those of text.
    """

    size: int
    identity: str
    begin: tuple[int, ...]
    end: int | None
    about: dict[str, Any]

    def encode(self, texts: Sequence[str]) -> Iterator[numpy.ndarray]:
        """The tokens of each text, and no others."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; U+FFFD for what is no whole character."""
        ...

    def unlike(self, first: Sequence[numpy.ndarray] = ()) -> str:
        """The difference in how transformers reads text with the files beside it, in a clause; "" if there is none.

        Args:
            first: tokens of some documents, (n,) each, whose texts are tried too.
        """
        ...

    @property
    def names(self) -> Sequence[str]:
        """The text by which each token is shown."""
        ...


class Bytes:
    """A token is a byte of UTF-8. None begins or ends a document: what follows is of another one."""

    size, identity = 256, "bytes"
    begin: tuple[int, ...] = ()
    end: int | None = None

    def __init__(self) -> None:
        self.about: dict[str, Any] = {"tokenizer": "bytes", "begins": "", "ends": "", "off": [], "added": []}

    def encode(self, texts: Sequence[str]) -> Iterator[numpy.ndarray]:
        """The UTF-8 bytes of each text, (n,) uint8."""
        return (numpy.frombuffer(text.encode(), dtype=numpy.uint8) for text in texts)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some bytes, with U+FFFD for what is no UTF-8."""
        return bytes(tokens).decode(errors="replace")

    def unlike(self, first: Sequence[numpy.ndarray] = ()) -> str:
        """Nothing: transformers has no part in it."""
        return ""

    @property
    def names(self) -> Sequence[str]:
        """A printable name for each of the 256 tokens."""
        return [repr(chr(byte))[1:-1] for byte in range(256)]


def document(
    tokens: numpy.ndarray, begin: tuple[int, ...], end: int | None, *, begins: bool = True, ends: bool = True
) -> numpy.ndarray:
    """The tokens of a document, (n,): those of its text, between those that begin and end one.

    This alone decides it, for training and for a prompt. A text that brings its own beginning, as a rendered chat
    template does, gets no second one. A document without a token of text stays empty.

    Args:
        tokens: (n,), of its text, or of a piece of it.
        begin, end: those of a `Tokenizer`.
        begins, ends: whether the document begins and ends with this piece.
    """
    first, last = list(begin), [] if end is None else [end]
    whole_and_empty = begins and ends and not len(tokens)
    if not begins or whole_and_empty or tokens[: len(first)].tolist() == first:
        first = []
    if not ends or whole_and_empty:
        last = []
    return numpy.concatenate([numpy.array(first, tokens.dtype), tokens, numpy.array(last, tokens.dtype)])


def foreign(name: str, files: Sequence[Path]) -> Foreign:
    """The bounds of what works with these files, if they exist, under a name for messages. Raises UnusableText."""
    from fsdp2_extra.foreign.bounds import Foreign

    there = [file for file in files if os.path.lexists(file)]
    try:
        for file in there:
            require_small(file)
    except ValueError as error:
        raise UnusableText(str(error)) from None
    fix = "give another with --tokenizer, or shorter documents"
    return Foreign(name, UnusableText, fix, sum(file.stat().st_size for file in there))

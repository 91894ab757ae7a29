"""Text to token numbers and back: bytes, or a tokenizer of Hugging Face's `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy

from fsdp2.data.splits import identity_of


class UnusableText(ValueError):
    """Text, or a tokenizer, that can't be used. The message is one line."""


class Tokenizer(Protocol):
    """What makes tokens of text.

    Attributes:
        size: one more than its largest token.
        identity: says which tokenizer it is; two that differ have two.
        end: the token that ends a document, if it has one.
    """

    size: int
    identity: str
    end: int | None

    def encode(self, texts: Sequence[str], *, end: bool = True) -> Iterator[numpy.ndarray]:
        """The tokens of each text, with the one that ends a document unless `end` is false."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; U+FFFD for what is no whole character."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """How each token is shown."""
        ...


class Bytes:
    """A token is a byte of UTF-8. There is none for the end of a document: what follows is of another one."""

    size, identity, end = 256, "bytes", None

    def encode(self, texts: Sequence[str], *, end: bool = True) -> Iterator[numpy.ndarray]:
        """The UTF-8 bytes of each text, (n,) uint8. There is no token for an end."""
        return (numpy.frombuffer(text.encode(), dtype=numpy.uint8) for text in texts)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some bytes, with U+FFFD for what is no UTF-8."""
        return bytes(tokens).decode(errors="replace")

    @property
    def names(self) -> Sequence[str]:
        """A printable name for each of the 256 tokens."""
        return [repr(chr(byte))[1:-1] for byte in range(256)]


class FromFile:
    """A tokenizer.json, and the token that ends a document if the file beside it names one.

    Raises UnusableText if the file can't be read, or `tokenizers` isn't installed.
    """

    def __init__(self, file: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise UnusableText("tokenizers isn't installed; pip install 'fsdp2-reference[hf]'") from None
        try:
            content = file.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
            cuts = self._tokenizer.truncation is not None or self._tokenizer.padding is not None
            # A file's own settings would cut each document, or train on what fills it up.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        except Exception as error:  # its errors are of no class of their own
            raise UnusableText(f"{file}: is not a tokenizer ({' '.join(str(error).split())[:120]})") from None
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self.end = self._tokenizer.token_to_id(_end_token(file.with_name("tokenizer_config.json")))
        # Text that was prepared with such settings in force is other tokens.
        self.identity = identity_of(content + repr(self.end).encode() + b"whole" * cuts)

    def encode(self, texts: Sequence[str], *, end: bool = True) -> Iterator[numpy.ndarray]:
        """The tokens of each text, (n,) uint32, and the end token after them unless `end` is False."""
        ending = [self.end] if end and self.end is not None else []
        for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
            yield numpy.array([*encoding.ids, *ending], dtype=numpy.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, special ones included."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    @property
    def names(self) -> Sequence[str]:
        """The text of each token."""
        return [self._tokenizer.decode([number], skip_special_tokens=False) for number in range(self.size)]


def _end_token(settings: Path) -> str:
    """The end-of-text token's text; empty if the tokenizer's settings name none."""
    try:
        token: Any = json.loads(settings.read_bytes()).get("eos_token") or ""
    except FileNotFoundError:
        return ""  # a tokenizer.json alone has no settings
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UnusableText(f"{settings}: can't be used ({' '.join(str(error).split())[:120]})") from None
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise UnusableText(f"{settings}: its eos_token is no text")
    return text


def open_tokenizer(name: str) -> Bytes | FromFile:
    """`bytes`, a tokenizer.json, or a folder with one. Raises UnusableText."""
    if name == "bytes":
        return Bytes()
    file = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not file.is_file():
        raise UnusableText(f"{name}: has no tokenizer.json; give a folder or file that has one, or bytes")
    return FromFile(file)

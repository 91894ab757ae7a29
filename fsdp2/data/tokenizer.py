"""Text to token numbers and back: bytes, or a tokenizer of Hugging Face's `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from fsdp2.data.splits import identity_of
from fsdp2.units import install

if TYPE_CHECKING:
    from fsdp2.foreign.bounds import Foreign

LONGEST_FRONT = 16  # tokens that begin a document; those that are known have at most a few


class UnusableText(ValueError):
    """Text, or a tokenizer, that can't be used. The message is one line."""


class Tokenizer(Protocol):
    """What makes tokens of text.

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

    @property
    def names(self) -> Sequence[str]:
        """How each token is shown."""
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

    @property
    def names(self) -> Sequence[str]:
        """A printable name for each of the 256 tokens."""
        return [repr(chr(byte))[1:-1] for byte in range(256)]


class FromFile:
    """A tokenizer.json, and the token that ends a document if the file beside it names one.

    Args:
        bos: `auto` begins a document with the tokens that the file's post-processor puts there, `never` with none, and
            `always` with the `bos_token` of the file beside it if the post-processor has none.

    Raises UnusableText if the file can't be read, `always` finds no token, or `tokenizers` isn't installed.
    """

    def __init__(self, file: Path, bos: str = "auto") -> None:
        try:
            import tokenizers
        except ImportError:
            raise UnusableText(f"tokenizers isn't installed; {install('hf')}") from None
        try:
            content = file.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
            off = _settings(self._tokenizer)
            # A file's own settings would cut each document, or train on what fills it up.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            front = _front(self._tokenizer)
        except Exception as error:  # its errors are of no class of their own
            raise UnusableText(f"{file}: is not a tokenizer ({' '.join(str(error).split())[:120]})") from None
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        if len(front) > LONGEST_FRONT or max(front, default=0) >= self.size:
            has = f"{len(front)} tokens" if len(front) > LONGEST_FRONT else "a token that it doesn't have"
            raise UnusableText(f"{file}: its post-processor puts {has} before a text; give another tokenizer")
        settings = file.with_name("tokenizer_config.json")
        for one in _declared(settings):
            known = self._tokenizer.token_to_id(one) is not None
            if not known or len(self._tokenizer.encode(one, add_special_tokens=False).ids) != 1:
                raise UnusableText(
                    f"{settings}: declares a token {one[:40]!r}, which {file.name} would split; write both again "
                    "with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
                )
        self.end = self._tokenizer.token_to_id(_named(settings, "eos_token"))
        if bos == "always" and not front:
            token = self._tokenizer.token_to_id(_named(settings, "bos_token"))
            if token is None:
                raise UnusableText(f"--bos always: {file} has no token that begins a text; drop --bos")
            front = (token,)
        self.begin = () if bos == "never" else front
        last = () if self.end is None else (self.end,)
        begins, ends = ("".join(str(self._tokenizer.id_to_token(one)) for one in some) for some in (self.begin, last))
        added = list(self._tokenizer.get_added_tokens_decoder())
        self.about: dict[str, Any] = {"tokenizer": str(file), "begins": begins, "ends": ends}
        self.about |= {"off": off, "added": added}
        # Text that was prepared with such settings in force is other tokens.
        self.identity = identity_of(content + repr(self.end).encode() + b"whole" * bool(off))

    def encode(self, texts: Sequence[str]) -> Iterator[numpy.ndarray]:
        """The tokens of each text, (n,) uint32, without those of the post-processor."""
        for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
            yield numpy.array(encoding.ids, dtype=numpy.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, special ones included."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    @property
    def names(self) -> Sequence[str]:
        """The text of each token."""
        return [self._tokenizer.decode([number], skip_special_tokens=False) for number in range(self.size)]


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


def _settings(tokenizer: Any) -> list[str]:
    """What a tokenizer.json asks for that would cut documents, or fill them up."""
    cut, fill = tokenizer.truncation, tokenizer.padding
    found = [] if cut is None else [f"truncation to {cut['max_length']} tokens"]
    return found if fill is None else [*found, f"padding to {fill['length'] or 'the longest'}"]


def _front(tokenizer: Any) -> tuple[int, ...]:
    """The tokens that the post-processor of a `tokenizers.Tokenizer` puts before a text.

    Of no text, so that a vocabulary without a certain letter has them too: it is one token that no vocabulary has.
    """
    mark = 2**32 - 1
    text = tokenizer.encode("", add_special_tokens=False)
    text.truncate(0)
    text.pad(1, pad_id=mark)
    found = tokenizer.post_process(text).ids
    return tuple(found[: found.index(mark)])


def _read(settings: Path) -> dict[str, Any]:
    require_regular(settings)
    try:
        found = json.loads(settings.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it holds no settings by name")
        return found
    except FileNotFoundError:
        return {}  # a tokenizer.json alone has no settings
    except (OSError, ValueError, RecursionError) as error:
        raise UnusableText(f"{settings}: can't be used ({' '.join(str(error).split())[:120]})") from None


def _declared(settings: Path) -> list[str]:
    """The texts of tokens that transformers adds to those of a tokenizer.json."""
    found = _read(settings)
    tokens: list[Any] = []
    for name in ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"):
        given = found.get(name) or ()
        tokens += given.values() if isinstance(given, dict) else given if isinstance(given, list) else ()
    texts = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    return [text for text in texts if isinstance(text, str) and text]


def _named(settings: Path, name: str) -> str:
    """The text of a token, such as `eos_token`; empty if the tokenizer's settings name none."""
    token: Any = _read(settings).get(name) or ""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise UnusableText(f"{settings}: its {name} is no text")
    return text


def open_tokenizer(name: str, bos: str = "auto") -> Tokenizer:
    """`bytes`, a tokenizer.json, or a folder with one, within bounds; `bos` as of `FromFile`. Raises UnusableText."""
    if name == "bytes":
        if bos == "always":
            raise UnusableText("--bos always: bytes have no token that begins a text; drop --bos")
        return Bytes()
    file = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not file.exists():
        raise UnusableText(f"{name}: has no tokenizer.json; give a folder or file that has one, or bytes")
    from fsdp2.foreign.bounds import in_bounds

    return in_bounds(lambda: FromFile(file, bos), foreign(str(file), [file]))


def foreign(name: str, files: Sequence[Path]) -> Foreign:
    """The bounds of what works with these files, under a name for messages. Raises UnusableText."""
    from fsdp2.foreign.bounds import Foreign

    for file in files:
        require_regular(file)
    fix = "give another with --tokenizer, or shorter documents"
    return Foreign(name, UnusableText, fix, sum(file.stat().st_size for file in files))


def require_regular(file: Path) -> None:
    """Raises UnusableText for what waits when it is read, or has no end."""
    if file.exists() and not file.is_file():
        raise UnusableText(f"{file}: is no regular file; put a copy of its content there")

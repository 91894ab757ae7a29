"""A tokenizer of Hugging Face's `tokenizers`: its tokenizer.json, and what the files beside it declare."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy

from fsdp2.data.errors import UnusableText
from fsdp2.data.splits import identity_of
from fsdp2.units import install
from fsdp2_extra.foreign.model_files import files_to_keep
from fsdp2_extra.text.tokenizer import Bytes, Tokenizer, foreign

# What of a tokenizer's folder its class in transformers reads, and a chat template.
FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
    *("*chat_template*", "*chat_templates/*"),
)
SETTINGS = "config.json"  # of a model; it names the tokens that no file of its tokenizer does
KEPT = (*FILES, SETTINGS)
DECLARING = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", SETTINGS)
OTHER_FORMS = ("vocab.*", "merges.txt", "*.model", "tokenizer_config.json")  # of a tokenizer
LONGEST_FRONT = 16  # tokens that begin a document; those that are known have at most a few


def open_tokenizer(name: str, bos: str = "auto") -> Tokenizer:
    """`bytes`, a tokenizer.json, or a folder with one, within bounds; for `bos` see `FromFile`. Raises UnusableText."""
    if name == "bytes":
        if bos == "always":
            raise UnusableText("--bos always: bytes have no token that begins a text; drop --bos")
        return Bytes()
    file = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not file.exists():
        raise UnusableText(f"{name}: has no tokenizer.json; give a folder or file that has one, or bytes")
    from fsdp2_extra.foreign.bounds import in_bounds

    return in_bounds(
        lambda: FromFile(file, bos), foreign(str(file), [file, *(file.parent / name for name in DECLARING)])
    )


def own_tokenizer(folder: Path) -> str:
    """The tokenizer of a model's folder, for `open_tokenizer`; bytes where there is none. Raises UnusableText."""
    if (folder / "tokenizer.json").is_file():
        return str(folder)
    if found := sorted(file.name for form in OTHER_FORMS for file in folder.glob(form)):
        raise UnusableText(
            f"{folder}: its tokenizer is in {found[0]}, and only a tokenizer.json is read; write one with "
            "transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    return "bytes"


def tokenizer_files(name: str) -> dict[str, bytes]:
    """Path in the folder -> content of the files that a run keeps of a tokenizer. Raises UnusableText.

    A file under any name is `tokenizer.json` among them.
    """
    place = Path(name)
    folder = place if place.is_dir() else place.parent
    try:
        found = files_to_keep(folder, KEPT, place)
    except ValueError as error:
        raise UnusableText(str(error)) from None
    files = {file.relative_to(folder).as_posix(): file.read_bytes() for file in found}
    return files if place.is_dir() else {**files, "tokenizer.json": place.read_bytes()}


def is_tokenizers(name: str) -> bool:
    """Return whether a file beside a model is its tokenizer's."""
    return any(fnmatch(name, pattern) for pattern in FILES)


def is_kept(name: str) -> bool:
    """Return whether a run may have written a file of this name among those of its tokenizer."""
    return any(fnmatch(name, pattern) for pattern in KEPT)


class FromFile:
    """A tokenizer.json, and the token that ends a document if the files beside it name one.

    Args:
        bos: `auto` begins a document with the tokens that the file's post-processor puts there, `never` with none, and
            `always` with the `bos_token` of the files beside it if the post-processor has none.

    Raises UnusableText if the file can't be read or lacks a token that those beside it declare, if `always` finds no
    token, or `tokenizers` isn't installed.
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
            # A file's own settings would cut each document, train on what fills it up, or split it by chance.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            if hasattr(self._tokenizer.model, "dropout"):
                self._tokenizer.model.dropout = None
            front = _front(self._tokenizer)
        except Exception as error:  # its errors are of no class of their own
            raise UnusableText(f"{file}: is not a tokenizer ({' '.join(str(error).split())[:120]})") from None
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        if len(front) > LONGEST_FRONT or max(front, default=0) >= self.size:
            has = f"{len(front)} tokens" if len(front) > LONGEST_FRONT else "a token that it doesn't have"
            raise UnusableText(f"{file}: its post-processor puts {has} before a text; give another tokenizer")
        self._folder = file.parent
        declared = _Declared(self._folder)
        for one, where in declared.others():
            known = self._tokenizer.token_to_id(one) is not None
            if not known or len(self._tokenizer.encode(one, add_special_tokens=False).ids) != 1:
                raise _split(one, where, file)
        self.end, first = (self._token(declared, name, file) for name in ("eos_token", "bos_token"))
        special = [text for name in NAMED if isinstance(text := declared.named(name)[0], str)]
        own = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()} | {""}
        self._ordinary = sorted({*special, *(text for text, _ in declared.others())} - own)
        if bos == "always" and not front:
            if first is None:
                raise UnusableText(f"--bos always: {file} has no token that begins a text; drop --bos")
            front = (first,)
        self.begin = () if bos == "never" else front
        last = () if self.end is None else (self.end,)
        begins, ends = ("".join(str(self._tokenizer.id_to_token(one)) for one in some) for some in (self.begin, last))
        added = list(self._tokenizer.get_added_tokens_decoder())
        self.about: dict[str, Any] = {"tokenizer": str(file), "begins": begins, "ends": ends}
        self.about |= {"off": off, "added": added}
        # Text that was prepared with such settings in force is other tokens.
        self.identity = identity_of(content + repr(self.end).encode() + b"whole" * bool(off))

    def _token(self, declared: _Declared, name: str, file: Path) -> int | None:
        """The number of `eos_token` or `bos_token`; None if nothing names one."""
        named, where = declared.named(name)
        if isinstance(named, int):
            return named if self._tokenizer.id_to_token(named) else None
        token: int | None = self._tokenizer.token_to_id(named)
        if named and token is None:
            raise _split(named, where, file)
        return token

    def encode(self, texts: Sequence[str]) -> Iterator[numpy.ndarray]:
        """The tokens of each text, (n,) uint32, without those of the post-processor."""
        for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
            yield numpy.array(encoding.ids, dtype=numpy.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, special ones included."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def unlike(self, first: Sequence[numpy.ndarray] = ()) -> str:
        """The difference in how AutoTokenizer reads text, that of the `first` tokens too; "" if there is none."""
        from fsdp2_extra.text.auto_tokenizer import unlike

        end, texts = "" if self.end is None else self.decode([self.end]), [self.decode(one.tolist()) for one in first]
        return unlike(self._folder, self._tokenizer, end, self._ordinary, texts)

    @property
    def names(self) -> Sequence[str]:
        """The text of each token."""
        return [self._tokenizer.decode([number], skip_special_tokens=False) for number in range(self.size)]


def _settings(tokenizer: Any) -> list[str]:
    """Name the settings of a tokenizer.json that would cut documents, fill them up, or split them by chance."""
    cut, fill, chance = tokenizer.truncation, tokenizer.padding, getattr(tokenizer.model, "dropout", None)
    found = [] if cut is None else [f"truncation to {cut['max_length']} tokens"]
    found += [f"dropout of {chance:g}"] if chance else []
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


NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKENS = ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")


class _Declared:
    """The tokens that the files beside a tokenizer.json declare, as transformers takes them.

    special_tokens_map.json and added_tokens.json count where tokenizer_config.json has no `added_tokens_decoder`, and
    then the map's tokens go before those of tokenizer_config.json. Where neither names a token, as in GPT-2's folder,
    transformers takes that of the tokenizer's class, whose number config.json has.

    Source: `PreTrainedTokenizerBase._from_pretrained` of transformers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        names = ("tokenizer_config.json", "special_tokens_map.json")
        self._files = [(folder / name, _read(folder / name)) for name in names]
        self._early = "added_tokens_decoder" not in self._files[0][1]
        if not self._early:
            del self._files[1:]

    def others(self) -> Iterator[tuple[str, Path]]:
        """The texts of tokens without a part of their own, and the file of each."""
        for file, found in self._files:
            for name in _TOKENS:
                given = found.get(name) or ()
                tokens = given.values() if isinstance(given, dict) else given if isinstance(given, list) else ()
                texts = (token.get("content") if isinstance(token, dict) else token for token in tokens)
                yield from ((text, file) for text in texts if isinstance(text, str) and text)
        if self._early:
            file = self._folder / "added_tokens.json"
            yield from ((text, file) for text in _read(file) if text)

    def named(self, name: str) -> tuple[str | int, Path]:
        """The text of a token, such as `eos_token`, or its number, and the file that names it; "" if there is none."""
        for file, found in reversed(self._files):
            if name in found:
                token: Any = found[name] or ""
                text = token.get("content") if isinstance(token, dict) else token
                if not isinstance(text, str):
                    raise UnusableText(f"{file}: its {name} is no text")
                return text, file
        file = self._folder / "config.json"
        number: Any = _read(file).get(f"{name}_id")
        first = number[0] if isinstance(number, list) and number else number
        return (first if type(first) is int and 0 <= first < 2**32 else ""), file


def _split(token: str, where: Path, file: Path) -> UnusableText:
    return UnusableText(
        f"{where}: declares a token {token[:40]!r}, which {file.name} would split; write both again with transformers: "
        "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    )


def _read(settings: Path) -> dict[str, Any]:
    try:
        found = json.loads(settings.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it holds no settings by name")
        return found
    except FileNotFoundError:
        return {}  # a tokenizer.json alone has no settings
    except (OSError, ValueError, RecursionError) as error:
        raise UnusableText(f"{settings}: can't be used ({' '.join(str(error).split())[:120]})") from None

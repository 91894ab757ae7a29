"""`--dataset text:PATH` and `chat:PATH`: documents as tokens, packed into windows that don't mix them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy

from fsdp2.data.errors import NotHere, UnusableText
from fsdp2.data.splits import Dataset
from fsdp2_extra.text.chat import open_chat
from fsdp2_extra.text.forms import Fields
from fsdp2_extra.text.places import PUBLISHED, SUFFIXES, File, find, published, suffix_of
from fsdp2_extra.text.prepared import SPLITS, Encoder, is_prepared, open_splits, read_meta, require_made_with, source_of
from fsdp2_extra.text.preparing import Say, prepare, silent
from fsdp2_extra.text.reading import rows_of
from fsdp2_extra.text.rows import Row
from fsdp2_extra.text.tokenizer import Tokenizer, document
from fsdp2_extra.text.tokenizer_file import open_tokenizer
from fsdp2_extra.text.windows import Mixture

SOON = 4 << 20  # bytes of text that are tokenised in a second or two


class Text:
    """Makes tokens of plain text, which a line of .jsonl or a row of .parquet has as its `field`; an `Encoder`."""

    kind: str = "text"
    suffixes: tuple[str, ...] = SUFFIXES

    def __init__(self, tokenizer: Tokenizer, field: str = "text") -> None:
        self.field: str | Fields = field
        self.tokenizer = tokenizer
        self.size, self.identity, self.about = tokenizer.size, tokenizer.identity, tokenizer.about
        self.begin, self.end = tokenizer.begin, tokenizer.end

    def source(self) -> str | None:
        """The field of the text."""
        return str(self.field)

    def left_out(self) -> set[str]:
        """Nothing: a text has no messages."""
        return set()

    def encode(self, rows: Sequence[Row]) -> Iterator[tuple[numpy.ndarray, None]]:
        """The tokens of each row, (n,), as `document` gives them; None, since each counts for the loss."""
        found = self.tokenizer.encode([row.content for row in rows])
        for row, tokens in zip(rows, found, strict=True):
            yield document(tokens, self.begin, self.end, begins=row.begins, ends=row.ends), None


def encoder_of(
    kind: str, tokenizer: str, field: str = "text", bos: str = "auto", fields: Fields | None = None
) -> Encoder:
    """Open the encoder of `text` or `chat`; `fields` are of chat, and `bos` of text, as `open_tokenizer` takes it.

    Raises UnusableText.
    """
    return open_chat(tokenizer, fields) if kind == "chat" else Text(open_tokenizer(tokenizer, bos), field)


def opened(
    name: str, tokenizer: str, field: str = "text", bos: str = "auto", fields: Fields | None = None, mixed: bool = False
) -> tuple[str, Encoder]:
    """The place that a `--dataset` of one source names, as `found` takes it, and its encoder. Raises UnusableText."""
    kind, _, place = name.partition(":")
    if name.startswith(PUBLISHED):
        from fsdp2_extra.text.published import find as find_published
        from fsdp2_extra.text.published import kind_of

        kind, place = kind_of(find_published(place), field, fields or {}, mixed=mixed), name
    return place, encoder_of(kind, tokenizer, field, bos, fields)


def found(place: str, suffixes: tuple[str, ...]) -> list[File]:
    """The files of a place, which may be one of `datasets`, as a file of .json is. Raises UnusableText."""
    if suffix_of(place) == ".json" and os.path.isfile(os.path.expanduser(place)):
        place = PUBLISHED + published(place)
    if not place.startswith(PUBLISHED):
        return find(place, suffixes)
    from fsdp2_extra.text.published import find as find_published

    return [find_published(place.removeprefix(PUBLISHED))]


def load(
    place: str,
    seq_len: int,
    vocab_size: int,
    encoder: Encoder,
    *,
    apart: bool,
    fetch: bool = True,
    say: Say = silent,
    drop: bool = False,
    whole: bool = False,
) -> Dataset:
    """Documents of files, or of a folder that `prepare` has made.

    Args:
        place: a file, a folder or a pattern; several with commas between them; or `datasets:` and what that reads.
        say: is called from time to time while files are prepared, with how far that is.
        drop: leave out conversations that can't be learned.
        whole: train and test split are all of it.

    Raises UnusableText, in one line, and NotHere where `fetch` is false and files aren't prepared yet.
    """
    require_fit(encoder, vocab_size)
    folder = Path(place) if is_prepared(place) else cached(place, encoder, say, fetch=fetch)
    meta = read_meta(folder)
    require_made_with(encoder, folder, meta)
    found = open_splits(folder, place, meta, seq_len, encoder.size, apart=apart, drop=drop, whole=whole)
    joined = []
    for name, parts in ((f"its {SPLITS[0]} split", found.train), (f"its {SPLITS[1]} split", found.test)):
        if whole and not parts:
            continue
        name, filled = "it" if whole else name, [one for one in parts if len(one)]
        if not filled:
            tokens = sum(len(one.tokens) for one in parts)
            raise UnusableText(
                f"{place}: {name} has {tokens} tokens, which fill no sequence of {seq_len}; lower --seq-len or give "
                "more text"
            )
        joined.append(filled[0] if len(filled) == 1 else Mixture(filled))
        if not joined[-1].target_count(range(len(joined[-1]))):
            raise UnusableText(
                f"{place}: {name} has nothing to learn: each of its documents is one token, which is no target; give "
                "longer ones"
            )
    about = {**meta, **encoder.about, **found._asdict(), "place": place}
    return Dataset(joined[0], joined[-1], classes=encoder.tokenizer.names, about=about)


def check(
    place: str,
    seq_len: int,
    vocab_size: int,
    encoder: Encoder,
    *,
    apart: bool,
    read: bool = True,
    drop: bool = False,
    whole: bool = False,
) -> None:
    """Raises UnusableText for what can be told soon, and before any rank waits for another. For the others see `load`.

    Args:
        read: look at the text too: all of it if it is little, else at the first document of each file on this machine.
    """
    require_fit(encoder, vocab_size)
    if is_prepared(place):
        require_made_with(encoder, Path(place), read_meta(Path(place)))
        files = []
    else:
        files = found(place, encoder.suffixes)
    if not read:
        return
    if sum(file.size for file in files) <= SOON:
        load(place, seq_len, vocab_size, encoder, apart=apart, drop=drop, whole=whole)  # the run maps what this leaves
        return
    for file in files:
        list(encoder.encode(list(islice(rows_of(file, encoder.field), 1))))


def require_fit(encoder: Encoder | Tokenizer, vocab_size: int) -> None:
    """Raise UnusableText if a model has no row for each token."""
    if not vocab_size:
        raise UnusableText("the model's size has no vocab_size; name it in the sizes of its ModelSpec")
    if encoder.size > vocab_size:
        raise UnusableText(
            f"its tokenizer has {encoder.size} tokens, and the model's vocabulary {vocab_size}; give the model's own"
        )


def cached(place: str, encoder: Encoder, say: Say = silent, *, fetch: bool = True) -> Path:
    """The prepared form of files, made in the cache folder if it isn't there. Raises UnusableText, NotHere."""
    from fsdp2.data.mnist import cache_folder

    files = found(place, encoder.suffixes)
    folder = cache_folder() / f"text-{source_of(files, encoder)}"
    if not is_prepared(folder):
        if not fetch:
            raise NotHere(place)
        prepare(files, folder, encoder, say=say)
    return folder

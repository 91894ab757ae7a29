"""Documents as tokens, on a disk: made once, and mapped into memory, so that 10^9 tokens take no time to open.

train.bin test.bin            the tokens of all documents, one after the other, uint8, uint16 or uint32
train-ends.bin …              int64: where each document ends
train-learn.bin …             of conversations, uint8: 1 where a token is to be predicted
train-targets.bin …           of conversations, int64: how many are, up to the end of each
meta.json                     written last: counts, dtype, what it was made of and with, and sizes of the files
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy

from fsdp2.data.errors import UnusableText
from fsdp2.data.splits import identity_of
from fsdp2_extra.text.forms import FORMS, Fields, fields_of, spelled
from fsdp2_extra.text.places import File
from fsdp2_extra.text.rows import Row
from fsdp2_extra.text.tokenizer import Tokenizer
from fsdp2_extra.text.windows import Conversations, Documents

FORMAT = 10
META = "meta.json"
SPLITS = ("train", "test")
MOST = 4096  # characters of a text in meta.json; the longest is a field that the command line names
MOST_BYTES = 16 << 20  # of meta.json; a large one has a line for each token that ends a turn
DTYPES = ("uint8", "uint16", "uint32")
NAMES = {"format", "kind", "tokenizer", "begin", "field", "fields", "source", "content", "dtype"}
NAMES |= {"documents", "tokens", "characters", "empty", "beside", "turns", "unlike", "files"}
EMPTY = numpy.empty(0, dtype=numpy.uint8)


class Encoder(Protocol):
    """Turns documents into tokens.

    Attributes:
        kind: `text`, or `chat`, which says of each token whether it is to be predicted.
        size: one more than its largest token.
        identity: says which one it is; two that differ have two.
        begin, end: the tokens that it puts before a document, and the one that ends a text.
        field: of a line or row, the one that holds the text; of `chat` how those of conversations are called.
        suffixes: of the files that it reads.
        about: see `Tokenizer`; of `chat` also the file of its `template`.
    """

    kind: str
    size: int
    identity: str
    begin: tuple[int, ...]
    end: int | None
    about: dict[str, Any]
    field: str | Fields
    suffixes: tuple[str, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of its text, which knows how each token is shown."""

    def source(self) -> str | None:
        """The field of text, or the form of conversations, that it has encoded."""

    def encode(self, rows: Sequence[Row]) -> Iterator[tuple[numpy.ndarray, numpy.ndarray | None]]:
        """The tokens of each row, (tokens,), none for one that is empty; and of `chat` a mask of them, uint8."""
        ...


def dtype_of(encoder: Encoder) -> Any:
    """The smallest that holds each of its tokens."""
    kinds = (numpy.uint8, numpy.uint16, numpy.uint32)
    return next(kind for kind in kinds if encoder.size <= numpy.iinfo(kind).max + 1)


def source_of(files: Sequence[File], encoder: Encoder) -> str:
    """Says which files in which state are made into tokens, and how."""
    how = encoder.kind, encoder.identity, encoder.begin, encoder.field
    return identity_of(repr((FORMAT, list(files), *how)).encode())


def is_prepared(place: str | Path) -> bool:
    """Return whether `python -m fsdp2.data prepare` finished this folder."""
    return os.path.isfile(os.path.join(place, META))  # pathlib's raises for a list longer than any path


def files_of(kind: str) -> list[str]:
    """The names of a folder's columns."""
    columns = ("", "-ends", "-learn", "-targets") if kind == "chat" else ("", "-ends")
    return [f"{split}{column}.bin" for split in SPLITS for column in columns]


def read_meta(folder: Path) -> dict[str, Any]:
    """Raises UnusableText if a folder isn't as `prepare` left it."""
    try:
        if (folder / META).stat().st_size > MOST_BYTES:
            raise ValueError(f"its {META} is larger than any that prepare writes")
        meta: dict[str, Any] = json.loads((folder / META).read_bytes())
        if not (other := meta.get("format") != FORMAT):
            _require_form(meta)
        files = {} if other else meta["files"]
        wrong = [name for name, size in files.items() if (folder / name).stat().st_size != size]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnusableText(f"{folder}: is not a prepared text ({error!r}); prepare it again") from None
    if other or wrong:
        why = "is of another version" if other else f"{', '.join(wrong)} has another size than it was written with"
        raise UnusableText(f"{folder}: {why}; prepare it again")
    return meta


def _require_form(meta: dict[str, Any]) -> None:
    """Raises ValueError, or another error of what has another form, for a meta.json that `prepare` doesn't write.

    What the columns say too, `open_splits` compares with them. They don't say `characters` and `empty`.
    """
    if odd := sorted(NAMES ^ meta.keys()):
        raise ValueError(f"it says {'more' if odd[0] in meta else 'no'}: {odd[0][:40]}")
    words = [meta[name] for name in ("kind", "tokenizer", "fields", "content", "dtype", "source", "beside", "unlike")]
    if meta["kind"] != "chat":
        words.append(meta["field"])
    if not all(type(word) is str and len(word) <= MOST for word in words):
        raise ValueError("it says in other words than prepare writes")
    if meta["kind"] not in ("text", "chat") or meta["dtype"] not in DTYPES:
        raise ValueError(f"it is {meta['kind'][:40]} of {meta['dtype'][:40]}")
    if type(meta["begin"]) is not list or (meta["kind"] == "chat" and meta["field"] not in (None, *FORMS)):
        raise ValueError("its documents begin, or are found, in no way that prepare knows")
    if meta["fields"] != spelled(fields_of(meta["fields"] if meta["kind"] == "chat" else "")):
        raise ValueError("it says in other words than prepare does how fields are called")
    for keys, names in ((SPLITS, "documents"), (SPLITS, "tokens"), (files_of(meta["kind"]), "files")):
        if meta[names].keys() != set(keys):
            raise ValueError(f"it counts {names} of others than {', '.join(keys)}")
    turns = [count for token, (yes, no) in meta["turns"].items() for count in (int(token) + 1, yes, no)]
    by_name = [count for names in ("documents", "tokens", "files") for count in meta[names].values()]
    for count in (meta["characters"], meta["empty"], *meta["begin"], *by_name, *turns):
        if type(count) is not int or not 0 <= count < 2**63:
            raise ValueError(f"it counts {str(count)[:40]}")
    if [*meta["turns"]] != [str(int(token)) for token in meta["turns"]] or meta["turns"].get("-1", [0])[0]:
        raise ValueError("its turns end with tokens that are none")


def require_made_with(encoder: Encoder, folder: Path, meta: dict[str, Any]) -> None:
    """Raises UnusableText, naming what differs, if a folder was made with other settings."""
    if meta["kind"] != encoder.kind:
        raise UnusableText(f"{folder}: was prepared as {meta['kind']}; give it as {meta['kind']}:{folder}")
    if meta["tokenizer"] != encoder.identity:
        raise UnusableText(f"{folder}: was made with another tokenizer; give that with --tokenizer")
    if max(map(int, meta["turns"]), default=0) >= encoder.size:
        raise UnusableText(f"{folder}: ends turns with a token that its tokenizer doesn't have; prepare it again")
    if meta["begin"] != list(encoder.begin):
        what, bos = ("a", "always") if meta["begin"] else ("no", "never")
        raise UnusableText(f"{folder}: was prepared with {what} token before each document; give --bos {bos}")
    if encoder.kind == "text" and meta["field"] != encoder.field:
        raise UnusableText(f"{folder}: was made of the field {meta['field']}; add --text-field {meta['field']}")
    if not isinstance(encoder.field, str) and meta["fields"] != spelled(encoder.field):
        made, fix = (f"with {meta['fields']}", "give that") if meta["fields"] else ("of the usual fields", "drop it")
        raise UnusableText(f"{folder}: --chat-fields {spelled(encoder.field) or 'off'}: was made {made}; {fix}")


def open_splits(
    folder: Path, name: str, meta: dict[str, Any], seq_len: int, size: int, *, apart: bool
) -> list[Documents | Conversations]:
    """Train and test split of a source, mapped. Raises UnusableText, and a split does where a token isn't below `size`.

    Where all documents are of one split, the last tenth of its tokens, or of its conversations, is for the test.
    """

    try:
        return _open_splits(folder, name, meta, seq_len, size, apart=apart)
    except UnusableText:
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UnusableText(f"{folder}: is not a prepared text ({error!r}); prepare it again") from None


def _open_splits(
    folder: Path, name: str, meta: dict[str, Any], seq_len: int, size: int, *, apart: bool
) -> list[Documents | Conversations]:
    def column(split: str, name: str, dtype: str) -> numpy.ndarray:
        file = folder / f"{split}{name}.bin"  # an empty one can't be mapped
        return numpy.memmap(file, mode="r", dtype=dtype) if file.stat().st_size else EMPTY.astype(dtype)

    def documents(split: str, low: int, high: int, ends: numpy.ndarray) -> Documents:
        tokens = column(split, "", meta["dtype"])[low:high]
        if high - low < meta["tokens"][split]:
            ends = numpy.append(ends[(ends > low) & (ends < high)], high) - low
        return Documents(tokens, ends, seq_len, apart=apart, content=meta["content"], size=size)

    def conversations(split: str, low: int, high: int, ends: numpy.ndarray) -> Conversations:
        targets = column(split, "-targets", "int64")
        begin, before = (int(one[low - 1]) if low else 0 for one in (ends, targets))
        end = int(ends[high - 1]) if high else 0
        tokens, learn = (column(split, *one)[begin:end] for one in (("", meta["dtype"]), ("-learn", "uint8")))
        ends, targets = ends[low:high] - begin, targets[low:high] - before
        return Conversations(tokens, learn, ends, targets, seq_len, apart=apart, content=meta["content"], size=size)

    ends = {split: numpy.asarray(column(split, "-ends", "int64")) for split in SPLITS}
    for split, found in ends.items():
        count = len(column(split, "", meta["dtype"]))
        if {count, meta["tokens"][split]} != {int(found[-1]) if len(found) else 0}:
            raise ValueError(f"its documents don't end where its {split} split does")
        if (found[1:] <= found[:-1]).any() or (found[:1] <= 0).any():
            raise ValueError(f"documents of its {split} split end before they begin")
        if len(found) != meta["documents"][split]:
            raise ValueError(f"its {split} split has {len(found)} documents, and not as many as it says")
    chat, answers = meta["kind"] == "chat", 0
    for split, found in ends.items() if chat else ():
        answers += _answers(split, found, column(split, "-learn", "uint8"), column(split, "-targets", "int64"))
    if answers != sum(map(sum, meta["turns"].values())):
        raise ValueError(f"it has {answers} answers, and not as many as it says")
    if chat:
        _require_short([numpy.diff(one, prepend=0) for one in ends.values()], seq_len, name)
    part: Callable[[str, int, int, numpy.ndarray], Documents | Conversations] = conversations if chat else documents
    counts = meta["documents" if chat else "tokens"]
    if all(counts.values()):
        return [part(split, 0, counts[split], ends[split]) for split in SPLITS]
    (split,) = (split for split in SPLITS if counts[split])
    count = counts[split]
    if chat and count < 2:
        raise UnusableText(f"{name}: holds one conversation; give at least two, as one is for evaluation")
    cut = count - max(count // 10, int(chat))
    return [part(split, 0, cut, ends[split]), part(split, cut, count, ends[split])]


def _answers(split: str, ends: numpy.ndarray, learn: numpy.ndarray, targets: numpy.ndarray) -> int:
    """How many answers conversations have. Raises ValueError if their columns disagree."""
    count = int(ends[-1]) if len(ends) else 0
    if (len(learn), len(targets)) != (count, len(ends)):
        raise ValueError(f"columns of its {split} split have other lengths than its tokens and conversations")
    if not count:
        return 0
    if learn.max() > 1:
        raise ValueError(f"tokens of its {split} split are learned {learn.max()} times")
    first = numpy.append(0, ends[:-1])
    learned = numpy.add.reduceat(learn, first, dtype=numpy.int64) - learn[first]
    if (numpy.cumsum(learned) != targets).any():
        raise ValueError(f"conversations of its {split} split have other targets than it says")
    if not learned.all():
        raise ValueError(f"a conversation of its {split} split has nothing to learn")
    # An answer is a run of learned tokens. One that begins a conversation may follow that which ends another.
    begun = numpy.count_nonzero(learn[1:] > learn[:-1]) + int(learn[0])
    return int(begun + numpy.count_nonzero(learn[first[1:]] & learn[first[1:] - 1]))


def _require_short(lengths: Sequence[numpy.ndarray], seq_len: int, name: str) -> None:
    """Raises UnusableText if there is a conversation that fits into no sequence."""
    found = numpy.concatenate(lengths)
    if long := int((found > seq_len).sum()):
        raise UnusableText(
            f"{name}: {long} of {len(found)} conversations are longer than --seq-len {seq_len}, and none is cut; raise "
            f"it, to {found.max()} for the longest, or leave them out of the file"
        )

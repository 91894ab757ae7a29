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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy

from fsdp2.data.errors import UnusableText
from fsdp2.data.splits import identity_of
from fsdp2.units import printable
from fsdp2_extra.text.forms import FORMS, Fields, fields_of, spelled
from fsdp2_extra.text.places import File
from fsdp2_extra.text.rows import Row
from fsdp2_extra.text.tokenizer import Tokenizer
from fsdp2_extra.text.windows import Conversations, Documents

FORMAT = 17
META = "meta.json"
SPLITS = ("train", "test")
NAMED = 10  # conversations that a refusal names
MOST = 4096  # characters of a text in meta.json; the longest is a field that the command line names
MOST_BYTES = 16 << 20  # of meta.json; a large one has a line for each token that ends a turn
DTYPES = ("uint8", "uint16", "uint32")
NAMES = {"format", "kind", "tokenizer", "begin", "field", "fields", "source", "content", "dtype"}
NAMES |= {"documents", "tokens", "characters", "empty", "beside", "turns", "unlike", "files", "longest", "unlearned"}
NAMES |= {"refused", "refusal", "unread"}
TOO_LONG, UNLEARNED, REFUSED = "too_long", "no_answer", "refused"  # why one isn't learned, as records say it
UNREAD = "that can't be read"  # and, of the last, as messages do
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

    def left_out(self) -> set[str]:
        """The keys of the messages that it has encoded that say no, and that nothing reads."""
        ...

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
    words.append(meta["refusal"])
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
    named = [where for _, where in meta["longest"]] + meta["unlearned"] + meta["unread"]
    if len(named) > 3 * NAMED + 1 or not all(type(where) is str and len(where) <= 2 * MOST for where in named):
        raise ValueError("it names conversations in another way than prepare does")
    turns = [count for token, (yes, no) in meta["turns"].items() for count in (int(token) + 1, yes, no)]
    by_name = [count for names in ("documents", "tokens", "files") for count in meta[names].values()]
    lengths = [length for length, _ in meta["longest"]]
    for count in (meta["characters"], meta["empty"], meta["refused"], *meta["begin"], *by_name, *turns, *lengths):
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


class Splits(NamedTuple):
    """The parts of a prepared text that a run has.

    Attributes:
        train, test: its parts for each; without a test all are for training.
        left_out: of conversations, how many are left out, by why.
    """

    train: list[Documents | Conversations]
    test: list[Documents | Conversations]
    left_out: dict[str, int]


def open_splits(
    folder: Path, name: str, meta: dict[str, Any], seq_len: int, size: int, *, apart: bool, drop: bool, whole: bool
) -> Splits:
    """The parts of a source, mapped. Raises UnusableText, and a part does where a token isn't below `size`.

    Where all documents are of one split, the last tenth of its tokens, or of its conversations, is for the test. With
    `drop`, conversations that can't be learned are left out, and else refused; with `whole` nothing is for a test.
    """
    try:
        return _open_splits(folder, name, meta, seq_len, size, apart=apart, drop=drop, whole=whole)
    except UnusableText:
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UnusableText(f"{folder}: is not a prepared text ({error!r}); prepare it again") from None


def _open_splits(
    folder: Path, name: str, meta: dict[str, Any], seq_len: int, size: int, *, apart: bool, drop: bool, whole: bool
) -> Splits:
    def column(split: str, name: str, dtype: str) -> numpy.ndarray:
        file = folder / f"{split}{name}.bin"  # an empty one can't be mapped
        return numpy.memmap(file, mode="r", dtype=dtype) if file.stat().st_size else EMPTY.astype(dtype)

    def documents(split: str, low: int, high: int) -> Documents:
        tokens, all_ends = column(split, "", meta["dtype"])[low:high], ends[split]
        if high - low < meta["tokens"][split]:
            all_ends = numpy.append(all_ends[(all_ends > low) & (all_ends < high)], high) - low
        return Documents(tokens, all_ends, seq_len, apart=apart, content=meta["content"], size=size)

    def conversations(split: str, low: int, high: int) -> Conversations:
        tokens, learn = column(split, "", meta["dtype"]), column(split, "-learn", "uint8")
        which, targets = usable[split][low:high], column(split, "-targets", "int64")
        # Others at the same --seq-len are others' samples, also where as many are left out.
        content = identity_of(f"{meta['content']} {left_out}".encode()) if left_out else meta["content"]
        settings: dict[str, Any] = {"apart": apart, "content": content, "size": size}
        return Conversations(tokens, learn, ends[split], targets, seq_len, which, **settings)

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
    part: Callable[[str, int, int], Documents | Conversations] = conversations if chat else documents
    counts, left_out = meta["tokens"], dict[str, int]()
    if chat:
        usable, left_out = _usable(ends, {split: column(split, "-targets", "int64") for split in SPLITS}, seq_len)
        left_out |= {REFUSED: meta["refused"]} if meta["refused"] else {}
        if left_out and not drop:
            raise UnusableText(_refusal(name, meta, seq_len, left_out))
        counts = {split: len(found) for split, found in usable.items()}
    there = [split for split in SPLITS if counts[split]]
    if not there and not left_out:
        raise ValueError("it holds nothing")
    if not there:
        raise UnusableText(
            f"{name}: --bad-samples drop leaves none of its conversations; {why_left_out(left_out, seq_len)}"
        )
    if whole:
        return Splits([part(split, 0, counts[split]) for split in there], [], left_out)
    if len(there) == 2:
        train, test = (part(split, 0, counts[split]) for split in SPLITS)
        return Splits([train], [test], left_out)
    count = counts[there[0]]
    if chat and count < 2:
        raise UnusableText(f"{name}: holds one conversation; give at least two, as one is for evaluation")
    cut = count - max(count // 10, int(chat))
    return Splits([part(there[0], 0, cut)], [part(there[0], cut, count)], left_out)


def _answers(split: str, ends: numpy.ndarray, learn: numpy.ndarray, targets: numpy.ndarray) -> int:
    """The number of answers in conversations. Raises ValueError if their columns disagree."""
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
    # An answer is a run of learned tokens. One that begins a conversation may follow that which ends another.
    begun = numpy.count_nonzero(learn[1:] > learn[:-1]) + int(learn[0])
    return int(begun + numpy.count_nonzero(learn[first[1:]] & learn[first[1:] - 1]))


def _usable(
    ends: Mapping[str, numpy.ndarray], targets: Mapping[str, numpy.ndarray], seq_len: int
) -> tuple[dict[str, numpy.ndarray], dict[str, int]]:
    """The numbers of conversations of each split that a run can learn, and how many it can't, by why."""
    usable, counts = {}, dict.fromkeys((TOO_LONG, UNLEARNED), 0)
    for split in SPLITS:
        unlearned = numpy.diff(targets[split], prepend=0) == 0
        long = ~unlearned & (numpy.diff(ends[split], prepend=0) > seq_len)
        (usable[split],) = numpy.nonzero(~unlearned & ~long)
        counts[TOO_LONG] += int(long.sum())
        counts[UNLEARNED] += int(unlearned.sum())
    return usable, {why: count for why, count in counts.items() if count}


def require_most_read(unread: int, read: int, of: str, first: str) -> None:
    """Raise UnusableText where most can't be read, also where they may be left out.

    Args:
        of: what was counted, for the message.
        first: why the first can't be read: so often it is the template's fault, or that of the fields' names.
    """
    if unread > read:
        most = f"{unread:,} of {of} can't be read, and so many aren't left out; the first: " if unread > 1 else ""
        raise UnusableText(most + first)


def why_left_out(left_out: Mapping[str, int], seq_len: int, where: Mapping[str, str] = MappingProxyType({})) -> str:
    """The number of conversations that can't be learned, the reasons, in words, and where some are."""
    words = {TOO_LONG: f"longer than --seq-len {seq_len} (none is cut)", UNLEARNED: "without an answer to learn"}
    words[REFUSED] = UNREAD
    return " and ".join(
        f"{count:,} {words[why]}{(where.get(why) and f' in {where[why]}') or ''}" for why, count in left_out.items()
    )


def _refusal(name: str, meta: dict[str, Any], seq_len: int, left_out: Mapping[str, int]) -> str:
    """One line about conversations that can't be learned, with up to `NAMED` places."""
    drop = "mend them, or add --bad-samples drop, which leaves them out and counts them"
    if left_out == {REFUSED: 1}:
        return f"{printable(meta['refusal'])}; {drop}"
    long = [place for length, place in meta["longest"] if length > seq_len]
    some = {TOO_LONG: long, UNLEARNED: meta["unlearned"][:NAMED], REFUSED: meta["unread"]}
    count = sum(meta["documents"].values()) + meta["refused"]
    what = why_left_out(left_out, seq_len, {why: places(where) for why, where in some.items()})
    fix = f"raise --seq-len, to {meta['longest'][0][0]:,} for the longest, " * (TOO_LONG in left_out)
    reasons = f"; {printable(meta['refusal'])}" if REFUSED in left_out else ""
    # The file is named once.
    return f"{name}: " + f"of {count:,} conversations {what}{reasons}; {fix}{drop}".replace(f"{name}, line", "line")


def places(where: Sequence[str]) -> str:
    """Lines of files in few words: each file once."""
    by_file: dict[str, list[str]] = {}
    for one in where:
        file, _, number = one.rpartition(" ")
        by_file.setdefault(file, []).append(number)
    ordered = {file: sorted(numbers, key=lambda one: (len(one), one)) for file, numbers in by_file.items()}
    return "; ".join(f"{file}{'s' * (len(numbers) > 1)} {', '.join(numbers)}" for file, numbers in ordered.items())

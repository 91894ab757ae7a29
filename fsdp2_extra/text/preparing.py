"""From files to prepared documents.

They are made in a folder beside the one that is asked for, which is renamed when all of it is written. A process that
was killed has made nothing: the next one removes what it left, and begins again.
"""

from __future__ import annotations

import fcntl
import glob
import heapq
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy

from fsdp2.data.errors import UnusableText
from fsdp2.data.splits import identity_of
from fsdp2_extra.text.ends_of_turns import Turns
from fsdp2_extra.text.forms import of_line, read_of, spelled
from fsdp2_extra.text.places import File
from fsdp2_extra.text.prepared import (
    FORMAT,
    META,
    MOST,
    NAMED,
    SPLITS,
    Encoder,
    dtype_of,
    files_of,
    is_prepared,
    places,
    read_meta,
    require_most_read,
    source_of,
)
from fsdp2_extra.text.reading import rows_of
from fsdp2_extra.text.rows import Row, blocks
from fsdp2_extra.text.tokenizer import LOOKED_AT

SAY_SECONDS = 10.0
ENOUGH = 100  # conversations that can't be read, if they are more than the others, end the reading

Say = Callable[[str], None]


def silent(text: str) -> None:
    """For who shows no progress."""


def prepare(files: Sequence[File], folder: Path, encoder: Encoder, *, say: Say = silent) -> dict[str, Any]:
    """Tokenise files into a folder, which is there as a whole or not at all; its meta.json.

    `say` is called every `SAY_SECONDS` with how far it is. Raises UnusableText.
    """
    source = source_of(files, encoder)
    try:
        if not is_prepared(folder):
            if os.path.lexists(folder) and (not folder.is_dir() or os.listdir(folder)):
                raise UnusableText(f"{folder}: is there, and is no prepared text; choose another")
            with _beside(folder) as work:
                _make(files, work, source, encoder, say)
                try:
                    os.rename(work, folder)
                except OSError:
                    if not is_prepared(folder):  # else another process was faster, with the same
                        raise
    except OSError as error:
        raise UnusableText(
            f"{error.filename or folder}: can't be written ({error.strerror}); choose a folder that can (for the "
            "cache, XDG_CACHE_HOME)"
        ) from None
    meta = read_meta(folder)
    if meta["source"] != source:
        raise UnusableText(f"{folder}: was made of other files, or with other settings; choose another")
    return meta


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A new folder beside another, which is removed unless it is renamed; also by the next process, if this one dies.

    A process holds its folder before it writes into it, so one with files that nobody holds is a dead one's. Those of
    other hosts stay, since their locks may not be seen here.
    """
    begin = f"{folder.name}.unfinished-{socket.gethostname()}-"
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f"{glob.escape(begin)}*"):
        with suppress(OSError), _held(left):
            if any(left.iterdir()):
                shutil.rmtree(left)
    work = folder.with_name(begin + secrets.token_hex(8))
    work.mkdir()
    try:
        with ExitStack() as stack:
            with suppress(OSError):  # of a file system without locks, where what is left stays
                stack.enter_context(_held(work))
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Raises OSError if another process has it, or it can't be locked."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def _make(files: Sequence[File], work: Path, source: str, encoder: Encoder, say: Say) -> None:
    """Write the columns, and meta.json after them. Raises UnusableText."""
    said = time.monotonic()
    with ExitStack() as stack:
        columns = {name: stack.enter_context(open(work / name, "wb")) for name in files_of(encoder.kind)}
        output, first = _Output(encoder, columns), list[numpy.ndarray]()
        for number, file in enumerate(files, 1):
            for rows in blocks(rows_of(file, encoder.field)):
                for row, made in _encoded(encoder, rows):
                    if isinstance(made, UnusableText):
                        output.refuse(row, made)
                        continue
                    output.add(row, *made)
                    first += [made[0][:LOOKED_AT]] * (len(first) < LOOKED_AT)
                if time.monotonic() - said >= SAY_SECONDS:
                    said = time.monotonic()
                    say(f"file {number:,} of {len(files):,}, {sum(output.tokens.values()):,} tokens")
        for column in columns.values():
            _sync(column)
    fields = {} if isinstance(encoder.field, str) else encoder.field
    read = read_of(str(encoder.source()), fields) if output.beside else set()
    if output.beside and (none := sorted(read & {*of_line(fields).values()} - output.beside)):
        raise UnusableText(f"{files[0].name}: no line has the field {none[0]}, which --chat-fields names; drop it")
    output.require_most_read()
    if not sum(output.tokens.values()):
        others = f", nor in {len(files) - 1} others" if len(files) > 1 else ""
        raise UnusableText(f"{files[0].name}: there is no text in it{others}; give files that have some")
    meta = {
        "format": FORMAT,
        "kind": encoder.kind,
        "tokenizer": encoder.identity,
        "begin": list(encoder.begin),
        "field": encoder.source(),
        "fields": spelled(fields),
        "source": source,
        "content": output.content,
        "dtype": numpy.dtype(dtype_of(encoder)).name,
        "documents": output.documents,
        "tokens": output.tokens,
        "characters": output.characters,
        "empty": output.empty,
        "beside": ", ".join(sorted((output.beside - read) | encoder.left_out()))[:MOST],
        "turns": output.turns,
        "longest": sorted(output.longest, reverse=True),
        "unlearned": output.unlearned,
        "refused": output.refused,
        "refusal": output.refusal[:MOST],
        "unread": output.unread,
        "unlike": encoder.tokenizer.unlike(first),
        "files": {name: (work / name).stat().st_size for name in files_of(encoder.kind)},
    }
    with open(work / META, "wb") as last:
        last.write(json.dumps(meta, indent=1).encode() + b"\n")
        _sync(last)


def _encoded(encoder: Encoder, rows: Sequence[Row]) -> Iterator[tuple[Row, Any]]:
    """Each row as the encoder has it; of a conversation that can't be read, why."""
    for some in [rows] if encoder.kind == "text" else ([row] for row in rows):
        try:
            yield from zip(some, encoder.encode(some), strict=True)
        except UnusableText as error:
            if encoder.kind == "text":
                raise
            yield some[0], error


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


class _Output:
    """The columns while they are made.

    Attributes:
        content: says which documents came.
        tokens, documents, targets: by split.
        characters, empty: of documents of text, and how many documents hold none.
        beside: keys of conversations' lines.
        turns: of conversations, by the token that ends an answer: in how many it is learned, and in how many not.
        longest: of conversations, the tokens of some and where each is.
        unlearned: where some conversations are of which nothing is learned.
        refused: how many conversations can't be read.
    """

    def __init__(self, encoder: Encoder, files: Mapping[str, BinaryIO]) -> None:
        self._files, self._dtype = files, dtype_of(encoder)
        self._turns = (
            Turns(encoder.tokenizer.names, encoder.about["added"], encoder.end) if encoder.kind == "chat" else None
        )
        self._inside = ""  # the split of a document that has begun and not ended
        self.content, self.characters, self.empty = "", 0, 0
        self.tokens, self.documents, self.targets = (dict.fromkeys(SPLITS, 0) for _ in range(3))
        self.turns: dict[str, list[int]] = {}
        self.longest: list[tuple[int, str]] = []
        self.unlearned: list[str] = []
        self.refused, self._first = 0, ""
        self._reasons: dict[str, list[str]] = {}  # why, and where some are
        self.beside: set[str] = set()

    def refuse(self, row: Row, why: UnusableText) -> None:
        """Count one. Raises UnusableText where enough were read to know that most can't be."""
        self.refused, self._first = self.refused + 1, self._first or str(why)
        if len(self.unread) < NAMED:
            self._reasons.setdefault(str(why).removeprefix(row.where).lstrip(":, "), []).append(row.where)
        if self.refused >= ENOUGH:
            self.require_most_read("the first ")

    def require_most_read(self, of: str = "") -> None:
        """Raise UnusableText if more can't be read than can."""
        read = sum(self.documents.values())
        require_most_read(self.refused, read, f"{of}{self.refused + read:,} conversations", self._first)

    @property
    def unread(self) -> list[str]:
        """The places of some conversations that can't be read."""
        return [one for where in self._reasons.values() for one in where]

    @property
    def refusal(self) -> str:
        """The reasons why those in `unread` can't be read, each with its lines."""
        if len(self._reasons) < 2:
            return self._first
        found = "; ".join(f"{places(where)}: {why}" for why, where in self._reasons.items())
        file, _, _ = self.unread[0].rpartition(", ")  # which is named once, if it is the only one
        one = all(where.startswith(f"{file}, line ") for where in self.unread)
        return f"{file}, {found.replace(f'{file}, line', 'line')}" if one else found

    def add(self, row: Row, tokens: numpy.ndarray, learn: numpy.ndarray | None) -> None:
        if not len(tokens) and not self._inside:
            self.empty += row.ends
            return
        tokens = tokens.astype(self._dtype)
        identity = identity_of(tokens.tobytes() + (b"" if learn is None else learn.tobytes()))
        # One document in ten, by its tokens: the same one twice is in one split.
        split = self._inside or ("test" if int(identity[:2], 16) < 26 else "train")
        self.content = identity_of(f"{self.content}{identity}{row.ends}".encode())
        self.tokens[split] += len(tokens)
        self._files[f"{split}.bin"].write(tokens.tobytes())
        if learn is not None:
            self.beside |= row.content.keys()
            self.targets[split] += (count := int(learn[1:].sum()))  # nothing comes before the first
            self.unlearned += [row.where] * (not count and len(self.unlearned) <= NAMED)  # one more says so
            self.longest = heapq.nlargest(NAMED, [*self.longest, (len(tokens), row.where)])
            self._files[f"{split}-learn.bin"].write(learn.tobytes())
            for token, learned in self._turns(tokens, learn) if self._turns else ():
                self.turns.setdefault(str(token), [0, 0])[not learned] += 1
        else:
            self.characters += len(row.content)
        self._inside = "" if row.ends else split
        if row.ends:
            self.documents[split] += 1
            self._files[f"{split}-ends.bin"].write(numpy.int64(self.tokens[split]).tobytes())
            if learn is not None:
                self._files[f"{split}-targets.bin"].write(numpy.int64(self.targets[split]).tobytes())

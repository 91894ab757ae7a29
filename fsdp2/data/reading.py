"""The documents of files. No more of a file than a few blocks and documents is in memory."""

from __future__ import annotations

import codecs
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdp2.data.errors import UnusableText
from fsdp2.data.places import File
from fsdp2.units import install

AT_A_TIME, BLOCK = 1000, 8 << 20  # rows of a table, and bytes of their text, that are sent at a time
PIECE = 8 << 20  # bytes of a file of text that are tokenised at a time
LONGEST_LINE = 64 << 20  # as JSON it may take thirty times as many bytes of memory
MARK = "\ufeff"  # which editors of some systems write at the beginning of a file in UTF-8; it is none of its text


class _Twice(ValueError):
    """An object of JSON that has a key twice."""


@dataclass(frozen=True)
class Row:
    """A document, or a piece of one that is large.

    Attributes:
        content: its text; of conversations, all that a line holds.
        where: the file and the line, for a message.
        size: its bytes.
        begins, ends: whether a document does.
    """

    content: Any
    where: str
    size: int
    begins: bool = True
    ends: bool = True


def rows_of(file: File, field: str | None) -> Iterator[Row]:
    """The documents of a file: a line of .jsonl, a row of .parquet, or all of it, in pieces.

    Args:
        field: of a line or row, the one that holds the text; None = the line as it is.

    Raises UnusableText.
    """
    try:
        yield from {".jsonl": _lines, ".parquet": _table}.get(file.suffix, _pieces)(file, field)
        file.require_unchanged()
    except UnusableText:
        raise
    except (ValueError, RecursionError) as error:  # of UTF-8 and JSON
        raise UnusableText(f"{file.name}: can't be read as text ({' '.join(str(error).split())[:120]})") from None
    except OSError as error:
        raise UnusableText(f"{file.name}: can't be read ({' '.join(str(error).split())[:120]})") from None


def _lines(file: File, field: str | None) -> Iterator[Row]:
    with file.open() as stream:
        for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE + 1), b""), 1):
            where, size = f"{file.name}, line {number}", len(line)
            if size > LONGEST_LINE:
                raise UnusableText(f"{where}: is longer than {LONGEST_LINE >> 20} MiB; make several documents of it")
            if number == 1:
                line = line.removeprefix(MARK.encode())
            if line.strip():
                try:
                    content = json.loads(line.decode(), object_pairs_hook=_once)
                except _Twice as error:
                    raise UnusableText(f"{where}: {error}; keep one of them") from None
                text = _whole_in(content, line, where) if field is None else _text_in(content, field, where)
                yield Row(text, where, size)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises _Twice for a key that stands in it twice, of which the last would count."""
    if len(found := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise _Twice(f"an object has {twice[:40]!r} twice")
    return found


def _table(file: File, field: str | None) -> Iterator[Row]:
    from fsdp2.foreign.bounds import Foreign, in_bounds

    try:
        importlib.import_module("pyarrow.parquet")  # once, and not in the child of each file
    except ImportError:
        raise UnusableText(f"pyarrow isn't installed; {install('parquet')}") from None
    fix = "write it again with smaller texts, or as .jsonl"
    bounds = Foreign(file.name, UnusableText, fix, min(file.size, PIECE))
    table = in_bounds(lambda: _Table(file, field), bounds)
    while rows := table.read():
        yield from rows


class _Table:
    """A .parquet, of which a few kilobytes may hold gigabytes."""

    def __init__(self, file: File, field: str | None) -> None:
        self._rows = _rows_in_table(file, field)

    def read(self) -> list[Row]:
        """The next rows, none at the end. Raises UnusableText, and what Arrow does."""
        rows, size = list[Row](), 0
        for row in self._rows:
            rows.append(row)
            size += row.size
            if size >= BLOCK or len(rows) == AT_A_TIME:
                break
        return rows


def _rows_in_table(file: File, field: str | None) -> Iterator[Row]:
    import pyarrow.parquet as parquet

    assert field is not None, "conversations are lines"
    with file.open() as stream, parquet.ParquetFile(stream) as table:
        if field not in table.schema_arrow.names:
            has = ", ".join(table.schema_arrow.names[:5])
            raise UnusableText(f"{file.name}: has no column {field}; it has {has}; see --text-field")
        if table.schema_arrow.names.count(field) > 1:
            raise UnusableText(f"{file.name}: has several columns {field}; give one of them another name")
        number = 0
        for batch in table.iter_batches(batch_size=256, columns=[field]):
            # By name: of a struct `a` with a field `b` and a column `a.b`, Arrow takes that name for both.
            for value in batch.column(field).to_pylist():
                number += 1
                text = _text_in({field: value}, field, where := f"{file.name}, row {number}")
                yield Row(text, where, len(text))


def _pieces(file: File, field: str | None) -> Iterator[Row]:
    """A file that is one document: pieces of `PIECE` bytes and the rest of a line."""
    at, kept = 0, b""
    with file.open() as stream:
        while at < file.size:
            piece = stream.read(min(PIECE, file.size - at) - len(kept))
            if not piece:  # it has become shorter: see `rows_of`
                break
            piece = kept + piece + stream.readline(PIECE)
            decoder = codecs.getincrementaldecoder("utf-8")()
            ends = at + len(piece) >= file.size
            text = decoder.decode(piece, final=ends)
            kept = decoder.getstate()[0]  # the first bytes of a character, where a line is longer than two pieces
            if text.endswith("\r") and not ends:
                text, kept = text[:-1], b"\r" + kept
            begins, size = at == 0, len(piece) - len(kept)
            at += size
            if begins:
                text = text.removeprefix(MARK)
            # As Python reads text.
            text = text.replace("\r\n", "\n").replace("\r", "\n")
            yield Row(text, file.name, size, begins, ends)


def _whole_in(content: Any, line: bytes, where: str) -> Any:
    """Check a line's texts. Raises UnusableText if a text in it is none: only an escape gives half of a character."""
    if b"\\ud" in line.lower():
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UnusableText(f"{where}: has half of a character, which no text has; leave it out") from None
    return content


def _text_in(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        has = f"; it has {', '.join(list(map(str, row))[:5])}" if isinstance(row, dict) else ""
        if isinstance(row, dict) and field in row:
            has = f", but {'null' if row[field] is None else f'a {type(row[field]).__name__}'}; leave that one out"
        raise UnusableText(f"{where}: has no text in its field {field}{has}; see --text-field")
    text: str = row[field]
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnusableText(f"{where}: has half of a character in its field {field}, which no text has") from None
    return text

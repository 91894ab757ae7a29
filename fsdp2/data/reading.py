"""The documents of files, from any place in them on.

A file at a URL is read block by block from its beginning to its end: no more of it than a few blocks and documents is
in memory, and nothing of it on a disk. Where a connection fails, it is opened again where the last document ended.
"""

from __future__ import annotations

import codecs
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from fsdp2.data.errors import UnusableText
from fsdp2.data.places import BLOCK, File, is_url, pause
from fsdp2.units import install

AT_A_TIME = 1000  # rows of a table
PIECE = 8 << 20  # bytes of a file of text that are tokenised at a time
LONGEST_LINE = 64 << 20  # as JSON it may take thirty times as many bytes of memory
MARK = "\ufeff"  # which editors of some systems write at the beginning of a file in UTF-8; it is none of its text

Place = tuple[int, int]
"""In a file: bytes (rows of .parquet) before it, and lines before it."""


class _Ended(OSError):
    """A stream that ended before its file does."""


class _Twice(ValueError):
    """An object of JSON that has a key twice."""


@dataclass(frozen=True)
class Row:
    """A document, or a piece of one that is large.

    Attributes:
        content: its text; of conversations, all that a line holds.
        where: the file and the line, for a message.
        after: the place behind it.
        share: of the file that ends there, 0–1.
        size: its bytes.
        begins, ends: whether a document does.
    """

    content: Any
    where: str
    after: Place
    share: float
    size: int
    begins: bool = True
    ends: bool = True


def rows_of(file: File, field: str | None, start: Place = (0, 0)) -> Iterator[Row]:
    """The documents of a file from a place on: a line of .jsonl, a row of .parquet, or all of it, in pieces.

    Args:
        field: of a line or row, the one that holds the text; None = the line as it is.

    Raises UnusableText; Unreachable if a server fails, however often it is asked.
    """
    read = {".jsonl": _lines, ".parquet": _table}.get(file.suffix, _pieces)
    attempt = 0
    while True:
        try:
            for row in read(file, field, start):
                start, attempt = row.after, 0
                yield row
            file.require_unchanged()
            return
        except UnusableText:
            raise
        except (ValueError, RecursionError) as error:  # of UTF-8, JSON and Arrow
            raise UnusableText(f"{file.name}: can't be read as text ({' '.join(str(error).split())[:120]})") from None
        except Exception as error:  # each client raises errors of its own
            if not is_url(file.name):
                raise UnusableText(f"{file.name}: can't be read ({' '.join(str(error).split())[:120]})") from None
            attempt += 1
            pause(file.name, error, attempt)


def _begin_at(stream: BinaryIO, place: int) -> None:
    if not place:
        return
    try:
        stream.seek(place)
        return
    except ValueError:  # a server that gives no ranges; what fsspec opens there calls itself seekable
        pass
    while place > 0:
        skipped = len(stream.read(min(place, BLOCK)))
        if not skipped:
            raise _Ended("it ended before the place where reading went on")
        place -= skipped


def _lines(file: File, field: str | None, start: Place) -> Iterator[Row]:
    at, number = start
    with file.open() as stream:
        _begin_at(stream, at)
        while at < file.size:
            line = stream.readline(LONGEST_LINE + 1)[: file.size - at]
            where, size = f"{file.name}, line {number + 1}", len(line)
            if size > LONGEST_LINE:
                raise UnusableText(f"{where}: is longer than {LONGEST_LINE >> 20} MiB; make several documents of it")
            if not line or (not line.endswith(b"\n") and at + size < file.size):
                raise _Ended(f"ended after {at + size} of {file.size} bytes")
            if at == 0:
                line = line.removeprefix(MARK.encode())
            at, number = at + size, number + 1
            if line.strip():
                try:
                    content = json.loads(line.decode(), object_pairs_hook=_once)
                except _Twice as error:
                    raise UnusableText(f"{where}: {error}; keep one of them") from None
                text = _whole_in(content, line, where) if field is None else _text_in(content, field, where)
                yield Row(text, where, (at, number), at / file.size, size)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises _Twice for a key that stands in it twice, of which the last would count."""
    if len(found := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise _Twice(f"an object has {twice[:40]!r} twice")
    return found


def _table(file: File, field: str | None, start: Place) -> Iterator[Row]:
    from fsdp2.foreign.bounds import Foreign, in_bounds

    try:
        importlib.import_module("pyarrow.parquet")  # once, and not in the child of each file
    except ImportError:
        raise UnusableText(f"pyarrow isn't installed; {install('parquet')}") from None
    fix = "write it again with smaller texts, or as .jsonl"
    bounds = Foreign(file.name, UnusableText, fix, min(file.size, PIECE))
    table = in_bounds(lambda: _Table(file, field, start), bounds)
    while rows := table.read():
        if isinstance(rows, Exception):
            raise rows
        yield from rows


class _Table:
    """A .parquet, of which a few kilobytes may hold gigabytes."""

    def __init__(self, file: File, field: str | None, start: Place) -> None:
        self._rows = _rows_in_table(file, field, start)

    def read(self) -> list[Row] | Exception:
        """The next rows, none at the end; or what a client or Arrow has raised, in a form that can be sent."""
        rows, size = list[Row](), 0
        try:
            for row in self._rows:
                rows.append(row)
                size += row.size
                if size >= BLOCK or len(rows) == AT_A_TIME:
                    break
        except (UnusableText, MemoryError):
            raise
        except ValueError as error:
            return ValueError(str(error))
        except Exception as error:
            return _Ended(str(error))
        return rows


def _rows_in_table(file: File, field: str | None, start: Place) -> Iterator[Row]:
    import pyarrow.parquet as parquet

    assert field is not None, "conversations are lines"
    with file.open() as stream, parquet.ParquetFile(stream) as table:
        if field not in table.schema_arrow.names:
            has = ", ".join(table.schema_arrow.names[:5])
            raise UnusableText(f"{file.name}: has no column {field}; it has {has}; see --text-field")
        if table.schema_arrow.names.count(field) > 1:
            raise UnusableText(f"{file.name}: has several columns {field}; give one of them another name")
        number, count = 0, table.metadata.num_rows
        for group in range(table.num_row_groups):
            if number + table.metadata.row_group(group).num_rows <= start[0]:
                number += table.metadata.row_group(group).num_rows
                continue
            for batch in table.iter_batches(batch_size=256, row_groups=[group], columns=[field]):
                # By name: of a struct `a` with a field `b` and a column `a.b`, Arrow takes that name for both.
                for value in batch.column(field).to_pylist():
                    number += 1
                    if number > start[0]:
                        where = f"{file.name}, row {number}"
                        text = _text_in({field: value}, field, where)
                        yield Row(text, where, (number, number), number / count, len(text))


def _pieces(file: File, field: str | None, start: Place) -> Iterator[Row]:
    """A file that is one document: pieces of `PIECE` bytes and the rest of a line. Where they end follows from where
    they begin, so that they are the same wherever reading begins again."""
    at, kept = start[0], b""
    with file.open() as stream:
        _begin_at(stream, at)
        while at < file.size:
            wanted = min(PIECE, file.size - at)
            piece = kept + _exactly(stream, wanted - len(kept), file)
            if at + len(piece) < file.size:
                piece += stream.readline(PIECE)[: file.size - at - len(piece)]
            decoder = codecs.getincrementaldecoder("utf-8")()
            ends = at + len(piece) == file.size
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
            yield Row(text, file.name, (at, int(ends)), at / file.size, size, begins, ends)


def _exactly(stream: BinaryIO, count: int, file: File) -> bytes:
    found = stream.read(count)
    if len(found) < count:
        raise _Ended(f"{file.name} ended {count - len(found)} bytes early")
    return found


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
        raise UnusableText(f"{where}: has no text in its field {field}{has}; see --text-field")
    text: str = row[field]
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnusableText(f"{where}: has half of a character in its field {field}, which no text has") from None
    return text

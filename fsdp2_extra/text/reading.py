"""The documents of files. No more of a file than a few blocks and documents is in memory."""

from __future__ import annotations

import codecs
import importlib
import io
import json
from collections.abc import Iterator
from typing import Any

from fsdp2.data.errors import UnusableText
from fsdp2.units import install
from fsdp2_extra.text.forms import Fields
from fsdp2_extra.text.places import PUBLISHED, File
from fsdp2_extra.text.rows import Row, bounded, columns_of, rows_in, text_in

LONGEST_LINE = 64 << 20  # as JSON it may take thirty times as many bytes of memory
PIECE = 8 << 20  # bytes of a file of text that are tokenised at a time
MARK = "\ufeff"  # which editors of some systems write at the beginning of a file in UTF-8; it is none of its text


class _Twice(ValueError):
    """An object of JSON that has a key twice."""


def rows_of(file: File, field: str | Fields) -> Iterator[Row]:
    """The documents of a file: a line of .jsonl, a row of .parquet, or all of it, in pieces.

    Args:
        field: of a line or row, the one that holds the text; of conversations, which they name.

    Raises UnusableText.
    """
    try:
        yield from {".jsonl": _lines, ".parquet": _table, PUBLISHED: _published}.get(file.suffix, _pieces)(file, field)
        file.require_unchanged()
    except UnusableText:
        raise
    except (ValueError, RecursionError) as error:  # of UTF-8 and JSON
        raise UnusableText(f"{file.name}: can't be read as text ({' '.join(str(error).split())[:120]})") from None
    except OSError as error:
        raise UnusableText(f"{file.name}: can't be read ({' '.join(str(error).split())[:120]})") from None


def _lines(file: File, field: str | Fields) -> Iterator[Row]:
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
                text = text_in(content, field, where) if isinstance(field, str) else _whole_in(content, line, where)
                yield Row(text, where, size)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises _Twice for a key that stands in it twice, of which the last would count."""
    if len(found := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise _Twice(f"an object has {twice[:40]!r} twice")
    return found


def _table(file: File, field: str | Fields) -> Iterator[Row]:
    try:
        importlib.import_module("pyarrow.parquet")  # once, and not in the child of each file
    except ImportError:
        raise UnusableText(f"pyarrow isn't installed; {install('parquet')}") from None
    return bounded(file, lambda: _rows_in_table(file, field))


def _published(file: File, field: str | Fields) -> Iterator[Row]:
    from fsdp2_extra.text import published

    return bounded(file, lambda: published.rows(file, field))


def _rows_in_table(file: File, field: str | Fields) -> Iterator[Row]:
    import pyarrow.parquet as parquet

    with file.open() as stream, parquet.ParquetFile(stream) as table:
        names = table.schema_arrow.names
        batches = table.iter_batches(batch_size=256, columns=columns_of(names, field, file.name))
        yield from rows_in(batches, names, field, file.name)


def _pieces(file: File, field: str | Fields) -> Iterator[Row]:
    """A file that is one document: pieces of `PIECE` bytes and the rest of a line."""
    # As Python reads text, with its three ends of a line; a character or \r\n may be cut between two pieces.
    decoder, at = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True), 0
    with file.open() as stream:
        while piece := stream.read(PIECE):
            piece += stream.readline(PIECE)
            begins, at = at == 0, at + len(piece)
            text = decoder.decode(piece, final=at >= file.size)
            yield Row(text.removeprefix(MARK) if begins else text, file.name, len(piece), begins, at >= file.size)


def _whole_in(content: Any, line: bytes, where: str) -> Any:
    """Check a line's texts. Raises UnusableText if a text in it is none: only an escape gives half of a character."""
    if b"\\ud" in line.lower():
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UnusableText(f"{where}: has half of a character, which no text has; leave it out") from None
    return content

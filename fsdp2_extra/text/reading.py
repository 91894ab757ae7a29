"""The documents of files. No more of a file than a few blocks and documents is in memory."""

from __future__ import annotations

import codecs
import importlib
import io
from collections.abc import Iterator
from contextlib import contextmanager

from fsdp2.data.errors import UnusableText
from fsdp2.units import install
from fsdp2_extra.text.forms import Fields
from fsdp2_extra.text.places import PUBLISHED, File
from fsdp2_extra.text.rows import Row, bounded, columns_of, row_of, rows_in
from fsdp2_extra.text.written import MARK, NOT_UTF_8, require_whole, value_of

LONGEST_LINE = 64 << 20  # as JSON it may take thirty times as many bytes of memory
PIECE = 8 << 20  # bytes of a file of text that are tokenised at a time


def rows_of(file: File, field: str | Fields) -> Iterator[Row]:
    """The documents of a file: a line of .jsonl, a row of .parquet, or all of it, in pieces.

    `field` is the one of a line or row that holds the text; of conversations, which they name. Raises UnusableText.
    """
    try:
        with _as_utf_8(file.name):
            read = {".jsonl": _lines, ".parquet": _table, PUBLISHED: _published}.get(file.suffix, _pieces)
            yield from read(file, field)
        file.require_unchanged()
    except OSError as error:
        raise UnusableText(f"{file.name}: can't be read ({' '.join(str(error).split())[:120]})") from None


@contextmanager
def _as_utf_8(where: str) -> Iterator[None]:
    """Raise UnusableText for what is no UTF-8."""
    try:
        yield
    except UnusableText:
        raise
    except ValueError as error:
        raise UnusableText(f"{where}: {NOT_UTF_8.format(' '.join(str(error).split())[:120])}") from None


def _lines(file: File, field: str | Fields) -> Iterator[Row]:
    with file.open() as stream:
        for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE + 1), b""), 1):
            where, size = f"{file.name}, line {number}", len(line)
            if size > LONGEST_LINE:
                raise UnusableText(f"{where}: is longer than {LONGEST_LINE >> 20} MiB; make several documents of it")
            if number == 1:
                line = line.removeprefix(MARK.encode())
            if line.strip():
                with _as_utf_8(where):
                    written = line.decode()
                content = value_of(written, where)
                if not isinstance(field, str):
                    require_whole(content, written, where)
                yield row_of(content, field, where, size)


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

"""Documents and conversations as they are read, and those of tables, which a child process reads within bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fsdp2.data.errors import UnusableText
from fsdp2_extra.text.forms import READ, Fields, form_of, formless, of_line
from fsdp2_extra.text.places import File
from fsdp2_extra.text.written import value_of

AT_A_TIME, BYTES_AT_A_TIME = 1000, 8 << 20


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


def bounded(file: File, make: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """The rows of a table, of which a few kilobytes may hold gigabytes."""
    from fsdp2_extra.foreign.bounds import Foreign, in_bounds

    fix = "write it again with smaller texts, or as .jsonl"
    bounds = Foreign(file.name, UnusableText, fix, min(file.size, BYTES_AT_A_TIME))
    following = in_bounds(lambda: partial(next, blocks(make()), []), bounds)
    while rows := following():
        yield from rows


def blocks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Rows in blocks of as many as are read, or tokenised, together."""
    block: list[Row] = []
    size = 0
    for row in rows:
        block.append(row)
        size += row.size
        if len(block) == AT_A_TIME or size >= BYTES_AT_A_TIME:
            yield block
            block, size = [], 0
    if block:
        yield block


def rows_in(batches: Iterable[Any], names: Sequence[str], field: str | Fields, name: str) -> Iterator[Row]:
    """The rows of Arrow's tables with these columns: a text, or a conversation's fields. Raises UnusableText."""
    columns, number = columns_of(names, field, name), 0
    for batch in batches:
        # By name: of a struct `a` with a field `b` and a column `a.b`, Arrow takes that name for both.
        found = batch.select(columns)
        size = found.nbytes // max(1, found.num_rows)
        for content in found.to_pylist():
            number += 1
            where = f"{name}, row {number}"
            content = {one.name: _of_row(content[one.name], one.type, where) for one in found.schema}
            # What isn't read is named.
            yield row_of(content if isinstance(field, str) else {**dict.fromkeys(names), **content}, field, where, size)


def row_of(content: Any, field: str | Fields, where: str, size: int) -> Row:
    """A document, or a conversation. Raises UnusableText."""
    return Row(text_in(content, field, where) if isinstance(field, str) else content, where, size)


def _of_row(value: Any, kind: Any, where: str) -> Any:
    """A value of Arrow's as a row has it: a table has the keys of all rows in each, with null in those that lack one,
    and what differs from row to row as the text of JSON."""
    if value is None or (not kind.num_fields and not hasattr(kind, "extension_name")):
        return value
    if getattr(kind, "extension_name", None) == "arrow.json":
        return value_of(value, where)
    if isinstance(value, dict):
        found = {one.name: _of_row(value[one.name], one.type, where) for one in kind}
        return {name: one for name, one in found.items() if one is not None}
    if isinstance(value, list) and hasattr(kind, "value_type"):  # of a map they are pairs
        return [_of_row(one, kind.value_type, where) for one in value]
    return value


def columns_of(names: Sequence[str], field: str | Fields, name: str) -> list[str]:
    """The columns to read: the one of text, or those of conversations. Raises UnusableText."""
    if isinstance(field, str):
        found = [column for column in names if column == field]
        if not found:
            raise UnusableText(f"{name}: has no column {field}; it has {', '.join(names[:8])}; {_fix(names)}")
    else:
        found = [column for column in names if column in READ.union(of_line(field).values())]
        if form_of(found, field) is None or not {*names}.issuperset(of_line(field).values()):
            raise UnusableText(f"{name}: {formless(names, field)}")
    if twice := next((column for column in found if found.count(column) > 1), None):
        raise UnusableText(f"{name}: has several columns {twice}; give one of them another name")
    return found


def _fix(fields: Any) -> str:
    talks = isinstance(fields, dict | list | tuple) and form_of(map(str, fields), {})
    return "give conversations as chat:PATH" if talks else "see --text-field"


def text_in(row: Any, field: str, where: str) -> str:
    """The text of a field. Raises UnusableText if there is none."""
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        has = f"; it has {', '.join(list(map(str, row))[:5])}" if isinstance(row, dict) else ""
        if isinstance(row, dict) and field in row:
            has = f", but {'null' if row[field] is None else f'a {type(row[field]).__name__}'}; leave that one out"
        raise UnusableText(f"{where}: has no text in its field {field}{has}; {_fix(row)}")
    text: str = row[field]
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnusableText(f"{where}: has half of a character in its field {field}, which no text has") from None
    return text

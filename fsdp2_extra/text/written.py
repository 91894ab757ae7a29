"""JSON and CSV as they are written: no value gets another type, and nothing is left out.

Libraries of tables look for one type of a column. A text among lists becomes JSON, a date another date, `None` nothing,
and a number is rounded.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, TextIO

from fsdp2.data.errors import UnusableText

DEEPEST = 100  # of lists and objects in each other; what sends a row to another process counts them, too
NOT_UTF_8 = "can't be read as text ({}); write it again as UTF-8"
MARK = "\ufeff"  # which editors of some systems write at the beginning of a file in UTF-8; it is none of its text


class UnusableJson(ValueError):
    """JSON that isn't taken: a key twice in an object, of which the last would count, or lists too deep."""


def parse(text: str) -> Any:
    """The value of JSON. Raises ValueError for what is none, and UnusableJson."""
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise UnusableJson(f"its lists are more than {DEEPEST} deep") from None
    level, depth = [value], 0
    while text.count("[") + text.count("{") > DEEPEST and (level := [one for some in level for one in _inside(some)]):
        depth += 1
        if depth > DEEPEST:
            raise UnusableJson(f"its lists are more than {DEEPEST} deep")
    return value


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise UnusableJson(f"an object has {twice[:40]!r} twice; keep one of them")
    return found


def require_whole(content: Any, text: str, where: str) -> None:
    """Raise UnusableText if a text in a value of JSON is none: only an escape gives half of a character."""
    if "\\ud" in text.lower():
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UnusableText(f"{where}: has half of a character, which no text has; leave it out") from None


def value_of(text: str, where: str) -> Any:
    """The value of JSON. Raises UnusableText."""
    try:
        value = parse(text.rstrip())  # of a line that was cut off, its end would be called a control character
    except UnusableJson as error:
        raise UnusableText(f"{where}: {error}") from None
    except ValueError as error:
        raise UnusableText(
            f"{where}: can't be read as JSON ({' '.join(str(error).replace('line 1 ', '').split())[:120]})"
        ) from None
    return value


def objects(stream: TextIO, name: str) -> Iterator[tuple[Any, str, int]]:
    """The values of a file of JSON, where each is, and its size: one of each line, or of the list that the file is.

    A file is one value if its first line isn't an object. Raises UnusableText.
    """
    number, line = next(((at, one) for at, one in enumerate(stream, 1) if one.strip(f"{MARK} \t\r\n")), (0, ""))
    line = line.removeprefix(MARK)
    try:
        by_lines = isinstance(parse(line), dict) if number else True
    except UnusableJson:
        by_lines = True
    except ValueError:
        by_lines = False
    if by_lines:
        for at, one in enumerate(chain([line], stream), number):
            if one.strip():
                value = value_of(one, where := f"{name}, line {at}")
                require_whole(value, one, where)
                yield value, where, len(one)
        return
    text = line + stream.read()
    found = value_of(text, name)
    found = found if isinstance(found, list) else [found]
    for at, value in enumerate(found, 1):
        where = f"{name}, value {at}"
        require_whole(value, text, where)
        yield value, where, len(text) // len(found)


def records(stream: TextIO, name: str) -> Iterator[tuple[Any, str, int]]:
    """The rows of a file of CSV as texts by the names of its first row, where each is, and its size.

    Raises UnusableText.
    """
    csv.field_size_limit(sys.maxsize)  # the limits of its process count
    rows = csv.reader(stream, strict=True)
    try:
        names = next((row for row in rows if row), [])
        names[:1] = [one.removeprefix(MARK) for one in names[:1]]
        if twice := next((one for one in names if names.count(one) > 1), None):
            raise UnusableText(f"{name}: has several columns {twice[:40]}; give one of them another name")
        for row in rows:
            where = f"{name}, line {rows.line_num}"
            if row and len(row) != len(names):
                raise UnusableText(f"{where}: has {len(row)} fields, and its first line {len(names)}")
            if row:
                yield dict(zip(names, row, strict=True)), where, sum(map(len, row))
    except csv.Error as error:
        raise UnusableText(f"{name}, line {rows.line_num}: can't be read as CSV ({error})") from None

"""Reads what people and other programs write settings into: one place that trusts nothing of a file.

`--config`, a run's `config.json`, DeepSpeed's configuration and a search's record are all read here, so that each has
the same refusals. They are ValueErrors with a reason; the caller names the flag or the file.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

from fsdp2.checkpoint.files import NotAFile
from fsdp2.checkpoint.places import open_files

LARGEST = 16 << 20  # bytes
LARGEST_TOML = 1 << 20  # tomllib is Python, and reads 2 MB a second
DEEPEST = 50  # tables and lists in each other
LONGEST_NUMBER = 310  # digits: the longest float of 64 bits, written out, has 309


def read_table(place: str) -> dict[str, Any]:
    """The table that a settings file holds: JSON if its name says so, else TOML. Raises ValueError with the reason."""
    is_json = PurePath(place).suffix == ".json"
    values = (parse_json if is_json else parse_toml)(read_bytes(place))
    if not isinstance(values, dict):
        raise ValueError("must hold a table of names and values")
    return values


def read_bytes(place: str) -> bytes:
    """A small file, at a path or URL. Raises ValueError with the reason; a pipe keeps nobody waiting."""
    try:
        scheme, _, rest = place.rpartition("://")
        folder, _, name = rest.rpartition("/")
        files = open_files(f"{scheme}://{folder}") if scheme else open_files(Path(place).parent)
        with files.open(name if scheme else Path(place).name) as file:
            data = file.read(LARGEST + 1)
    except NotAFile:
        raise ValueError("is not a regular file; give one that holds the settings") from None
    except FileNotFoundError:
        raise ValueError("cannot be read (there is none); give an existing file") from None
    except (OSError, ImportError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"cannot be read ({reason}); give an existing file") from None
    if len(data) > LARGEST:
        raise ValueError(f"has more than {LARGEST >> 20} MiB, so it holds no settings")
    return data


def parse_json(data: bytes) -> Any:
    """JSON, strictly: no key twice, no NaN. Raises ValueError with the reason."""

    def load(text: str) -> Any:
        return json.loads(text, object_pairs_hook=_once, parse_int=_whole, parse_float=_finite, parse_constant=_finite)

    return _parsed(data, "JSON", load)


def parse_toml(data: bytes) -> Any:
    """TOML. Raises ValueError with the reason."""

    def load(text: str) -> Any:
        if len(text) > LARGEST_TOML:
            raise _Refused(f"has more than {LARGEST_TOML >> 20} MiB, so it holds no settings")
        # tomllib takes a time that is the square of a dotted key's parts.
        if any(line.count(".") > DEEPEST and _STRINGS.sub("", line).count(".") > DEEPEST for line in text.split("\n")):
            raise RecursionError
        return tomllib.loads(text, parse_float=_finite)

    return _parsed(data, "TOML", load)


class _Refused(ValueError):
    """A reason of ours, complete in itself."""


_TOO_LONG = "holds a number of hundreds of digits; write one that a computer calculates with"
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'')


def _parsed(data: bytes, language: str, load: Callable[[str], Any]) -> Any:
    try:
        values = load(data.decode("utf-8-sig"))
        _check(values)
    except _Refused:
        raise
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start} is no character); save it as UTF-8") from None
    except RecursionError:
        raise ValueError(f"nests tables or lists deeper than {DEEPEST}, which no settings do") from None
    except ValueError as error:
        if "set_int_max_str_digits" in str(error):  # Python's own limit, and its advice
            raise ValueError(_TOO_LONG) from None
        raise ValueError(f"is not valid {language} ({error})") from None
    return values


def _check(values: Any) -> None:
    """Raises RecursionError or _Refused. Without recursion: dotted keys nest tables deeper than Python's stack."""
    level, depth = [values], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise RecursionError
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, int) and value.bit_length() > LONGEST_NUMBER * 3:  # TOML has hexadecimal ones
                raise _Refused(_TOO_LONG)
        level = below


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _Refused(f"has {twice[:80]} twice in one table; drop one of them")
    return table


def _whole(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise _Refused(_TOO_LONG)
    return int(digits)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"holds {text[:80]}, which is no finite number; write one")
    return value

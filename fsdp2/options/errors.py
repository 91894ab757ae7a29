"""The one line by which a wrong option is refused."""

from __future__ import annotations

import difflib
import importlib.util
import math
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fsdp2.checkpoint.refusal import refusal
from fsdp2.units import install, printable


class ConfigError(ValueError):
    """A wrong flag, value or combination. The message is one line that names the flag and the fix."""

    def __init__(self, message: str) -> None:
        super().__init__(refusal(message))


@contextmanager
def refused(where: str) -> Iterator[None]:
    """Raise a ValueError of the body as a ConfigError that begins with `where`: a flag, or a flag and its value."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def flag_of(name: str) -> str:
    """`--batch-size` of `batch_size`."""
    return "--" + name.replace("_", "-")


def unknown(value: str, choices: Sequence[str]) -> str:
    """The reason for refusing a value, with the nearest choice."""
    close = [choice for choice in choices if value and choice.startswith(value)]
    close = close or difflib.get_close_matches(value.lower(), choices, 1)
    return f"must be one of {', '.join(choices)}" + (f"; did you mean {close[0]}?" if close else "")


class _Short(reprlib.Repr):
    """Bounded in depth and length whatever the value is."""

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write out more than 4,300 digits.
        digits = math.floor(x.bit_length() * math.log10(2)) + 1
        return repr(x) if digits < 40 else f"a number of {digits} digits"


_SHORT = _Short()
SHOWN = 80  # characters of a value in a refusal


def shown(value: Any, most: int = SHOWN) -> str:
    """A value as a refusal repeats it: printable, and short enough that the fix after it is still read."""
    if value is None or isinstance(value, bool) or value == "":
        return {None: "null", True: "true", False: "false", "": '""'}[value]
    line = printable(value[: most + 1] if isinstance(value, str) else _SHORT.repr(value))
    return line if len(line) <= most else f"{line[:most]}…"


def require(module: str, extra: str, what: str) -> None:
    """Raises ConfigError, naming the extra to install, if a module that `what` needs isn't there."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{what}: {module} isn't installed; {install(extra)}")


def some(values: Sequence[Any], most: int = 8) -> str:
    """The first of many values, and how many there are more: `0, 1, 2 and 5 more`."""
    rest = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + rest

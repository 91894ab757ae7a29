"""How an option is declared, checked and read from a command line or a file.

The options themselves are in `config.py`; this file only knows how to turn a dataclass of them into an
argparse parser, and text into values. A value is checked in one place, its `parse` function, wherever
it came from: the command line gives text, a file or a program gives numbers and booleans.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import math
import os
import re
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from fsdp2.checkpoint.files import Files
from fsdp2.checkpoint.places import open_files
from fsdp2.checkpoint.source import is_name, printable, refusal
from fsdp2.settings_file import read_table


class ConfigError(ValueError):
    """A wrong flag, value or combination. The message is one line that names the flag and the fix."""

    def __init__(self, message: str) -> None:
        super().__init__(refusal(message))


Parse = Callable[[Any], Any]


def option(
    default: Any, help: str, parse: Parse, *, bare: Any = None, metavar: str | None = None, many: bool = False
) -> Any:
    """Declare one option.

    `bare` is the value of the flag when it stands alone (`--mixed-precision` means bf16); `many` lets it
    be given more than once.
    """
    metadata = {"help": help, "parse": parse, "bare": bare, "metavar": metavar, "many": many}
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


# --- parse functions: text or value in, value out, ValueError with the reason otherwise ----------------

# The most that an option without a bound of its own takes: it fits the 32 bits of what counts in C.
COUNT = 2**31 - 1
LONGEST_TEXT = 4096
# Linux ends a name at 255 bytes and a path at 4,096; what a run writes below a folder takes 200 of them.
LONGEST_NAME, LONGEST_PATH = 255, 3840


def whole(minimum: int, maximum: int = COUNT) -> Parse:
    def parse(value: Any) -> int:
        try:
            if isinstance(value, bool) or (isinstance(value, str) and not value.isascii()):
                raise ValueError
            number = int(value)
            if number != value and not isinstance(value, str):  # 1.5
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise ValueError("must be a whole number") from None
        if number < minimum:
            raise ValueError(f"must be {minimum} or more")
        if number > maximum:
            raise ValueError(f"must be {maximum} or less")
        return number

    return parse


def number(minimum: float, maximum: float, *, open_minimum: bool = False) -> Parse:
    def parse(value: Any) -> float:
        try:
            if isinstance(value, bool) or (isinstance(value, str) and not value.isascii()):
                raise ValueError
            result = float(value)
        except (TypeError, ValueError):
            raise ValueError("must be a number") from None
        except OverflowError:  # a whole number of hundreds of digits
            result = math.inf
        if not math.isfinite(result):
            raise ValueError("must be a finite number")
        if result < minimum or result > maximum or (open_minimum and result == minimum):
            raise ValueError(f"must be {'above' if open_minimum else 'at least'} {minimum:g} and at most {maximum:g}")
        return result

    return parse


def one_of(*choices: str) -> Parse:
    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(unknown(shown(value), choices))
        return value

    return parse


def or_off(parse: Parse) -> Parse:
    """Let `off` on the command line undo what a file switched on."""
    return lambda value: None if value is None or value == "off" else parse(value)


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be some text")
    if len(value) > LONGEST_TEXT:
        raise ValueError(f"has {len(value)} characters; {LONGEST_TEXT} are the most")
    if not is_name(value):
        raise ValueError("has a character that no name can have: a NUL, or a byte that isn't UTF-8")
    return value


def location(value: Any) -> str:
    """The name of a file or folder, or a URL, that a system can have: else each use of it fails in a way of its own."""
    if max(len(part.encode()) for part in text(value).split("/")) > LONGEST_NAME:
        raise ValueError(f"has a name of more than {LONGEST_NAME} bytes, which no file system takes; shorten it")
    if len((value if "://" in value else os.path.abspath(value)).encode()) > LONGEST_PATH:
        raise ValueError(f"is a path of more than {LONGEST_PATH} bytes, which leaves no room below it; shorten it")
    return value


def patterns(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (str, list, tuple)):
        raise ValueError("must be some text, or a list of texts")
    return tuple(text(one) for one in ([value] if isinstance(value, str) else value))


def switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("is either true or false")
    return value


def optional_switch(value: Any) -> bool | None:
    return None if value is None else switch(value)


def unknown(value: str, choices: Sequence[str]) -> str:
    close = difflib.get_close_matches(value, choices, 1)
    return f"must be one of {', '.join(choices)}" + (f"; did you mean {close[0]}?" if close else "")


def is_step(value: str) -> bool:
    """Whether the text is the number of a step: `²` and `٣` are digits to Python, but no number of ours."""
    return value.isascii() and value.isdigit()


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


def checked(flag: str, value: Any, parse: Parse) -> Any:
    """The parsed value. Raises ConfigError that begins with the flag and the value."""
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"{flag} {shown(value)}: {error}") from None


# --- from a dataclass of options to values ---------------------------------------------------------------


def check_values(config: Any) -> None:
    """Parse each field of a frozen dataclass in place; raise ConfigError that names the flag."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None and field.default is None:
            continue
        object.__setattr__(config, field.name, checked(flag_of(field.name), value, field.metadata["parse"]))


def require(module: str, extra: str, what: str) -> None:
    """Raises ConfigError, naming the extra to install, if a module that `what` needs isn't there."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{what}: {module} isn't installed; pip install 'fsdp2-reference[{extra}]'")


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ConfigErrors, so that all refusals look and exit alike."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(re.sub(r"\S{100,}", lambda long: shown(long[0]), message.removeprefix("argument ")))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        for before, word in zip(["", *words], words, strict=False):
            flag, equals, value = word.partition("=") if word.startswith("--") else (before, "", word)
            if not value and (equals or not word):
                self.error(f'{flag} "": is empty; give a value, or drop it'.lstrip())
        values, extra = self.parse_known_args(words, namespace)
        if extra:
            known = [name for action in self._actions for name in action.option_strings]
            close = difflib.get_close_matches(extra[0].split("=")[0][:SHOWN], known, 1)
            hint = f"did you mean {close[0]}?" if close else "see --help"
            self.error(f"{shown(extra[0])}: no such flag; {hint}")
        return values


def make_parser(
    options: type, *, prog: str, description: str | None = None, add_help: bool = True
) -> argparse.ArgumentParser:
    """A parser with one flag for each field. It returns only what was given, for `read_values`."""
    parser = Parser(
        prog=prog,
        description=description,
        add_help=add_help,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="flags from a .toml or .json file, or one at a URL; the command line wins"
    )
    add_options(parser, options)
    parser.add_argument("--no-cuda", dest="device", action="store_const", const="cpu", help="the same as --device cpu")
    return parser


def add_options(parser: argparse._ActionsContainer, options: type) -> None:
    """One flag for each field of a dataclass, in a parser or a group of one."""
    for field in dataclasses.fields(options):
        meta, flag = field.metadata, flag_of(field.name)
        shown = "unset" if field.default in (None, ()) else field.default
        settings: dict[str, Any] = {"help": f"{meta['help']} (default: {shown})".replace("%", "%%")}
        if meta["parse"] in (switch, optional_switch):
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["metavar"] = meta["metavar"] or "VALUE"
            if meta["bare"] is not None:
                settings.update(nargs="?", const=meta["bare"])
            if meta["many"]:
                settings["action"] = "append"
        parser.add_argument(flag, **settings)


def read_values(options: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a parsed command line over its `--config` file. Raises ConfigError."""
    values = dict(given)
    place = values.pop("config", None)
    return {**({} if place is None else read_file(options, checked("--config", place, location))), **values}


def read_file(options: type, place: str, *, called: str = "--config") -> dict[str, Any]:
    """Flags from a TOML or JSON file, or from the `config.json` of an earlier run. Raises ConfigError.

    The latter's run directory and resume point belong to that run and are left out.
    """
    where = f"{called} {shown(place, LONGEST_NAME)}".lstrip()
    try:
        values = read_table(place)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    if "flags" in values:
        beside = sorted(values.keys() - {"flags", "environment"})
        if beside:
            raise ConfigError(
                f"{where}: has {shown(beside[0])} beside flags, where nothing reads it; move it into flags"
            )
        if not isinstance(values["flags"], dict):
            raise ConfigError(f'{where}: flags must be a table, such as {{"batch-size": 64}}')
        values = {k: v for k, v in values["flags"].items() if k not in ("run-dir", "resume", "resume-partial")}
    known = {field.name.replace("_", "-"): field.name for field in dataclasses.fields(options)}
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key[:SHOWN], list(known), 1)
            hint = f"did you mean {close[0]}?" if close else "the flags are those of fsdp2.train --help"
            raise ConfigError(f"{where}: {shown(key)} is not a flag; {hint}")
    return {known[key]: value for key, value in values.items()}


def files_at(place: str, flag: str) -> Files:
    """The files of a folder or URL. Raises ConfigError, naming the flag, for a URL that can't be used."""
    try:
        return open_files(place)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{flag} {place}: {error}") from None


def to_flags(config: Any) -> dict[str, Any]:
    """The inverse: each option under its flag's name, as JSON can hold it."""
    return {
        field.name.replace("_", "-"): list(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(config)
        for value in [getattr(config, field.name)]
    }

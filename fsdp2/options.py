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
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fsdp2.checkpoint.source import printable

# Longer than any refusal of ours; what is echoed of a user's value can be of any length.
LONGEST_REFUSAL = 1200


class ConfigError(ValueError):
    """A wrong flag, value or combination. The message is one line that names the flag and the fix."""

    def __init__(self, message: str) -> None:
        text = printable(message)
        half = LONGEST_REFUSAL // 2  # the flag stands at the start, the fix at the end
        super().__init__(text if len(text) <= LONGEST_REFUSAL else f"{text[:half]} … {text[-half:]}")


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


def whole(minimum: int) -> Parse:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError("must be a whole number")
        try:
            number = int(value)
        except (TypeError, ValueError):
            raise ValueError("must be a whole number") from None
        if number < minimum:
            raise ValueError(f"must be {minimum} or more")
        return number

    return parse


def number(minimum: float, maximum: float = math.inf, *, open_minimum: bool = False) -> Parse:
    def parse(value: Any) -> float:
        try:
            result = float(value)
        except (TypeError, ValueError):
            raise ValueError("must be a number") from None
        if not math.isfinite(result):
            raise ValueError("must be a finite number")
        if result < minimum or result > maximum or (open_minimum and result == minimum):
            raise ValueError(
                f"must be {'above' if open_minimum else 'at least'} {minimum:g}"
                + (f" and at most {maximum:g}" if maximum < math.inf else "")
            )
        return result

    return parse


def one_of(*choices: str) -> Parse:
    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(unknown(str(value), choices))
        return value

    return parse


def or_off(parse: Parse) -> Parse:
    """Let `off` on the command line undo what a file switched on."""
    return lambda value: None if value is None or value == "off" else parse(value)


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be some text")
    return value


def patterns(value: Any) -> tuple[str, ...]:
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


# --- from a dataclass of options to values ---------------------------------------------------------------


def check_values(config: Any) -> None:
    """Parse each field of a frozen dataclass in place; raise ConfigError that names the flag."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None and field.default is None:
            continue
        try:
            object.__setattr__(config, field.name, field.metadata["parse"](value))
        except ValueError as error:
            raise ConfigError(f"{flag_of(field.name)} {value}: {error}") from None


def require(module: str, extra: str, what: str) -> None:
    """Raises ConfigError, naming the extra to install, if a module that `what` needs isn't there."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{what}: {module} isn't installed; pip install 'fsdp2-reference[{extra}]'")


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ConfigErrors, so that all refusals look and exit alike."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        values, extra = self.parse_known_args(args, namespace)
        if extra:
            known = [name for action in self._actions for name in action.option_strings]
            close = difflib.get_close_matches(extra[0].split("=")[0], known, 1)
            hint = f"did you mean {close[0]}?" if close else "see --help"
            self.error(f"{extra[0]}: no such flag; {hint}")
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
    parser.add_argument("--config", metavar="FILE", help="flags from a .toml or .json file; the command line wins")
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
    """Merge a parsed command line over its `--config` file."""
    values = dict(given)
    path = values.pop("config", None)
    return {**(read_file(options, Path(path)) if path else {}), **values}


def read_file(options: type, path: Path) -> dict[str, Any]:
    """Flags from a TOML or JSON file, or from the `config.json` of an earlier run.

    The latter's run directory and resume point belong to that run and are left out.
    """
    try:
        content = path.read_text()
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror}); give an existing file") from None
    try:
        values = json.loads(content) if path.suffix == ".json" else tomllib.loads(content)
    except ValueError as error:
        raise ConfigError(f"--config {path}: is not valid {path.suffix[1:] or 'TOML'} ({error})") from None
    if isinstance(values, dict) and "flags" in values:
        values = {k: v for k, v in values["flags"].items() if k not in ("run-dir", "resume", "resume-partial")}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: must hold a table of flags, such as batch-size = 64")
    known = {field.name.replace("_", "-"): field.name for field in dataclasses.fields(options)}
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key, list(known), 1)
            raise ConfigError(
                f"--config {path}: {key} is not a flag" + (f"; did you mean {close[0]}?" if close else "")
            )
    return {known[key]: value for key, value in values.items() if value is not None}


def to_flags(config: Any) -> dict[str, Any]:
    """The inverse: each option under its flag's name, as JSON can hold it."""
    return {
        field.name.replace("_", "-"): list(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(config)
        for value in [getattr(config, field.name)]
    }

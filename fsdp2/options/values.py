"""An option's declaration, and the checks that make text or a value into one.

A value is checked in one place, its `parse` function, wherever it came from: the command line gives text, a file or a
program gives numbers and booleans.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from fsdp2.checkpoint.refusal import is_name
from fsdp2.options.errors import flag_of, refused, shown, unknown

Parse = Callable[[Any], Any]


def word_of(parse: Parse) -> str:
    """The word for a value of this check in `--help`: its choices, N for a number, else VALUE."""
    return str(getattr(parse, "word", "VALUE"))


def stands_for(word: str) -> Callable[[Parse], Parse]:
    """Give a check the word that `word_of` finds."""

    def named(parse: Parse) -> Parse:
        vars(parse)["word"] = word
        return parse

    return named


# --- parse functions: text or value in, value out, ValueError with the reason otherwise ----------------

# The most that an option without a bound of its own takes: it fits the 32 bits of what counts in C.
COUNT = 2**31 - 1
LONGEST_TEXT = 4096
# Linux ends a name at 255 bytes and a path at 4,096; what a run writes below a folder takes 200 of them.
LONGEST_NAME, LONGEST_PATH = 255, 3840


def option(
    default: Any,
    help: str,
    parse: Parse,
    *,
    bare: Any = None,
    metavar: str | None = None,
    many: bool = False,
    section: str | None = None,
) -> Any:
    """Declare one option.

    `bare` is the value of the flag when it stands alone (`--mixed-precision` means bf16); `many` lets it be given more
    than once; `section` is the title of `--help` under which it and those after it stand.
    """
    metadata = {"help": help, "parse": parse, "bare": bare, "many": many, "section": section}
    return dataclasses.field(default=default, metadata=metadata | {"metavar": metavar or word_of(parse)})


def whole(minimum: int, maximum: int = COUNT) -> Parse:
    @stands_for("N")
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
    @stands_for("X")
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
            raise ValueError(f"must be {('at least', 'above')[open_minimum]} {minimum:g} and at most {maximum:.7g}")
        return result

    return parse


def one_of(*choices: str) -> Parse:
    @stands_for("|".join(choices))
    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(unknown(shown(value), choices))
        return value

    return parse


def or_off(parse: Parse) -> Parse:
    """Let `off` on the command line undo what a file switched on."""

    @stands_for(word_of(parse))
    def either(value: Any) -> Any:
        return None if value is None or value == "off" else parse(value)

    return either


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be some text")
    if len(value) > LONGEST_TEXT:
        raise ValueError(f"has {len(value)} characters; {LONGEST_TEXT} are the most")
    if not is_name(value):
        raise ValueError("has a character that no name can have: a NUL, or a byte that isn't UTF-8")
    return value


@stands_for("PATH")
def location(value: Any) -> str:
    """The name of a file or folder, or a URL, that a system can have: else each use of it fails in a way of its own."""
    if max(len(part.encode()) for part in text(value).split("/")) > LONGEST_NAME:
        raise ValueError(f"has a name of more than {LONGEST_NAME} bytes, which no file system takes; shorten it")
    if len((value if "://" in value else os.path.abspath(value)).encode()) > LONGEST_PATH:
        raise ValueError(f"is a path of more than {LONGEST_PATH} bytes, which leaves no room below it; shorten it")
    return value


def model_name(names: Sequence[str]) -> Parse:
    """One of ours, or one that another library or a module of one's own has."""

    def parse(value: Any) -> str:
        if not isinstance(value, str) or ":" not in value:
            if isinstance(value, str) and value not in names and os.path.isdir(value):
                raise ValueError(f"is a folder; give hf:{shown(value)}")
            return str(one_of(*names, "hf:DIR_OR_NAME", "timm:NAME", "MODULE:FUNCTION")(value))
        library, _, rest = text(value).partition(":")
        if not rest or not library:
            raise ValueError("has nothing on one side of the colon; give hf:DIR_OR_NAME, timm:NAME or MODULE:FUNCTION")
        # The folder of one's own, wherever the run is resumed from.
        return f"hf:{os.path.abspath(rest)}" if library == "hf" and os.path.isdir(rest) else value

    return parse


def dataset_name(names: Sequence[str], prefixes: tuple[str, ...]) -> Parse:
    """One of ours, or the place of somebody's text; as absolute paths, wherever the run is resumed from."""

    def parse(value: Any) -> str:
        if not isinstance(value, str) or not value.startswith(prefixes):
            if isinstance(value, str) and value not in names and os.path.exists(value):
                raise ValueError(f"is a place; give chat:{shown(value)} for conversations, or text:{shown(value)}")
            return str(one_of(*names, *(f"{prefix}PLACE" for prefix in prefixes))(value))
        from fsdp2_extra.text.places import absolute

        return absolute(text(value))

    return parse


@stands_for("OURS=THEIRS,…")
def chat_fields(value: Any) -> str:
    from fsdp2_extra.text.forms import fields_of, spelled

    return ";".join(spelled(fields_of(part)) for part in text(value).split(";"))


@stands_for("PATTERN")
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


def is_step(value: str) -> bool:
    """Return whether the text is the number of a step: `²` and `٣` are digits to Python, but no number of ours."""
    return value.isascii() and value.isdigit()


@stands_for("true|false|N|auto")
def reshard_policy(value: Any) -> bool | int | None:
    # No `off`: it would read as false, and undo what a file says.
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or value in ("true", "false"):
        return value in (True, "true")
    with suppress(ValueError):
        return whole(2)(value)
    raise ValueError("must be true, false, a number of ranks from 2 up, or auto for torch's rule")


def count_or(*words: str, of: str) -> Parse:
    """A number from 1 up, of something, or one of some words."""

    @stands_for("|".join(["N", *words]))
    def parse(value: Any) -> int | str:
        with suppress(ValueError):
            return value if value in words else whole(1)(value)
        raise ValueError(f"must be a number of {of} from 1 up, or {' or '.join(words)}")

    return parse


granularity = count_or("layer", "root", of="blocks")
groups_ahead = count_or("off", of="groups")
steps_or_never = count_or("never", of="steps")


@stands_for("N|SHARE")
def steps_or_share(value: Any) -> float:
    for parse in (whole(0), number(0, 0.999)):
        with suppress(ValueError):
            return parse(value)
    raise ValueError("must be a number of steps, or a share of them below 1, such as 0.03")


@stands_for("auto|never|STEP|PATH")
def resume_place(value: Any) -> str:
    if isinstance(value, str):
        return str(whole(0)(value)) if is_step(value) else location(value)
    with suppress(ValueError):
        return str(whole(0)(value))  # files write resume = 120 as a number
    raise ValueError("must be auto, never, a step, or the path of a checkpoint or run")


@stands_for("X,X")
def betas(value: Any) -> tuple[float, float]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or len(parts) != 2:
        raise ValueError("must be two numbers, such as 0.9,0.95")
    first, second = (number(0, 1)(part) for part in parts)
    if 1.0 in (first, second):
        raise ValueError("must both be below 1")
    return first, second


TRACKERS = ("wandb", "mlflow", "tensorboard")  # each is a module's name, and that of the extra that brings it
LONGEST_TAG = 64  # characters that W&B takes


def trackers(value: Any) -> tuple[str, ...]:
    """Names by commas, or a list; `off` undoes what a file says."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)):
        raise ValueError("must be names of trackers, or a list of them")
    return () if value == "off" else tuple(dict.fromkeys(map(one_of(*TRACKERS), names)))


def tags(value: Any) -> tuple[str, ...]:
    """KEY=VALUE, or a list of them, of which the last with a key counts; `off` undoes what a file says."""
    given = patterns(value)
    if given == ("off",):
        return ()
    for one in given:
        if not re.fullmatch(r"(?!fsdp2-)[A-Za-z0-9_.-]+=.+", one):
            raise ValueError("must be KEY=VALUE, the key of letters, digits, _, . and -, and none of fsdp2-…")
        if len(one) > LONGEST_TAG:
            raise ValueError(f"has {len(one)} characters; {LONGEST_TAG} are the most that W&B takes")
    return tuple({one.partition("=")[0]: one for one in given}.values())


def checked(flag: str, value: Any, parse: Parse) -> Any:
    """The parsed value. Raises ConfigError that begins with the flag and the value."""
    with refused(f"{flag} {shown(value)}"):
        return parse(value)


# --- from a dataclass of options to values ---------------------------------------------------------------


def check_values(config: Any) -> None:
    """Parse each field of a frozen dataclass in place; raise ConfigError that names the flag."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default and value in (None, "auto"):
            continue
        object.__setattr__(config, field.name, checked(flag_of(field.name), value, field.metadata["parse"]))

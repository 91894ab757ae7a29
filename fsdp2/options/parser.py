"""From a dataclass of options to a parser for the command line, and to the files that hold options."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from fsdp2.checkpoint.files import Files
from fsdp2.checkpoint.places import open_files
from fsdp2.checkpoint.refusal import Refused, empty_word, without_links
from fsdp2.models.names import on_hub
from fsdp2.options.errors import SHOWN, ConfigError, flag_of, refused, shown
from fsdp2.options.own_model import require_named
from fsdp2.options.values import LONGEST_PATH, checked, location, optional_switch, reshard_policy, switch

OTHERS = Path(__file__).with_name("other_trainers.toml")
# What the short words of the help mean.
SHORT = "In this list, bare = the flag without a value, and unset = without the flag."


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ConfigErrors, so that all refusals look and exit alike."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(re.sub(r"\S{100,}", lambda long: shown(long[0]), message.removeprefix("argument ")))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, for `parse_args` and a command's parser. Raises ConfigError for what nobody knows."""
        words = list(sys.argv[1:] if args is None else args)
        if (empty := empty_word(words)) is not None:
            self.error(f"{empty}: is empty; give a value, or drop it")
        values, extra = super().parse_known_args(words, namespace)
        if extra:
            known = [name for action in self._actions for name in action.option_strings]
            flags = [word for word in extra if word.startswith("--")] or extra[:1]
            if not flags[0].startswith("-"):
                fix = instead(flags[0], known, "a flag has one value, and several go by commas: --betas 0.9,0.95")
                self.error(f"{shown(flags[0])}: belongs to no flag; {fix}")
            self.error("; ".join(f"{shown(one)}: no such flag; {instead(one, known)}" for one in flags))
        return values, extra


def instead(flag: str, known: Collection[str], otherwise: str = "see --help") -> str:
    """The fix for a flag that there isn't: its meaning for another trainer, or the nearest of those that are known."""
    name = flag.partition("=")[0].replace("_", "-")[:SHOWN]
    meant = tomllib.loads(OTHERS.read_text(encoding="utf-8")).get(name.lstrip("-"), "--")
    if not meant.startswith("--") or re.split("[ ,]", meant)[0] in known:
        return f"here it is {meant}" if meant.startswith("--") else meant
    return next((f"did you mean {close}?" for close in difflib.get_close_matches(name, known, 1)), otherwise)


def make_parser(
    options: type, *, prog: str, description: str | None = None, add_help: bool = True
) -> argparse.ArgumentParser:
    """A parser with one flag for each field. It returns only what was given, for `read_values`."""
    parser = Parser(
        prog=prog,
        usage="python -m %(prog)s [--config FILE] [flags]",
        description=f"{description or ''} {SHORT}".strip(),
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
    group = parser
    for field in dataclasses.fields(options):
        meta, flag = field.metadata, flag_of(field.name)
        if meta["section"] is not None:
            group = parser.add_argument_group(meta["section"])
        no_default = field.default in (None, ()) or field.default is False
        shown_default = "on" if field.default is True else field.default
        default = "" if no_default else f" (default: {shown_default})"
        settings: dict[str, Any] = {"help": f"{meta['help']}{default}".replace("%", "%%")}
        if meta["parse"] in (switch, optional_switch):
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["metavar"] = meta["metavar"]
            if meta["bare"] is not None:
                settings.update(nargs="?", const=meta["bare"])
            if meta["many"]:
                settings["action"] = "append"
        group.add_argument(flag, **settings)


def read_values(options: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a parsed command line over its `--config` file. Raises ConfigError."""
    values = dict(given)
    place = values.pop("config", None)
    return {**({} if place is None else read_file(options, checked("--config", place, location), values)), **values}


def read_file(options: type, place: str, given: Mapping[str, Any] = {}, *, called: str = "--config") -> dict[str, Any]:
    """Flags from a TOML or JSON file, or from the `config.json` of an earlier run. Raises ConfigError.

    The latter's run directory and resume point belong to that run and are left out. It is data, which may come from a
    stranger: what would run code that it names has to be among the flags that are `given` by name.
    """
    from fsdp2.options.settings_file import read_table

    where = f"{called} {shown(place, LONGEST_PATH)}".lstrip()
    with refused(where):
        values = read_table(place)
    is_of_a_run = "flags" in values or place.rpartition("/")[2] == "config.json"
    if "flags" in values:
        beside = sorted(values.keys() - {"flags", "environment"})
        if beside:
            raise ConfigError(f"{where}: has {shown(beside[0])} beside flags, where nothing reads it; move it there")
        if not isinstance(values["flags"], dict):
            raise ConfigError(f'{where}: flags must be a table, such as {{"batch-size": 64}}')
        values = {k: v for k, v in values["flags"].items() if k not in ("run-dir", "resume", "resume-partial")}
        values |= _kept(values, place, reads_weights=called != "")
    if is_of_a_run:
        require_named(values, given, where)
    return flags_of_table(options, values, where)


def flags_of_table(options: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values by their field of a dataclass, of those by their flag. Raises ConfigError, which `where` begins."""
    known = {field.name.replace("_", "-"): field.name for field in dataclasses.fields(options)}
    for key in sorted(values, key=lambda key: key != "model_type"):  # a model's own config.json is told by that
        if key not in known:
            hint = instead(flag_of(key), list(map(flag_of, known)), "the flags are those of fsdp2.train --help")
            raise ConfigError(f"{where}: {shown(key)} is not a flag; {hint}")
    return {known[key]: value for key, value in values.items()}


def _kept(values: Mapping[str, Any], place: str, *, reads_weights: bool) -> dict[str, str]:
    """The copies of a model's and a tokenizer's files that a run keeps beside its config.json, where theirs are gone.

    Who reads no weights there has the copies anyway, and asks no hub: they are as the run had them.
    """
    model, tokenizer = values.get("model"), values.get("tokenizer")
    copies: dict[str, str] = {}
    kept = _plain_folder(Path(place).parent / "model")
    if isinstance(model, str) and model.startswith("hf:") and (kept / "config.json").is_file():
        named = model.removeprefix("hf:")
        needs_own = reads_weights or values.get("lora") is not None
        if not needs_own or not (on_hub(named) or Path(named).expanduser().exists()):
            copies["model"] = f"hf:{kept.absolute()}"
    kept = _plain_folder(Path(place).parent / "tokenizer")
    wants_copy = (
        isinstance(tokenizer, str) and tokenizer != "bytes" and not (reads_weights and os.path.exists(tokenizer))
    )
    if wants_copy and (kept / "tokenizer.json").is_file():
        copies["tokenizer"] = str(kept.absolute())
    return copies


def _plain_folder(folder: Path) -> Path:
    """A folder that a run keeps. Raises ConfigError for links in it."""
    try:
        without_links(folder)
    except Refused as error:
        raise ConfigError(str(error)) from None
    return folder


def files_at(place: str, flag: str) -> Files:
    """The files of a folder or URL. Raises ConfigError, naming the flag, for a URL that can't be used."""
    try:
        return open_files(place)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{flag} {place}: {error}") from None


def words_of(options: type, name: str, value: Any) -> list[str]:
    """One option as it stands on a command line, quoted for a shell."""
    field = next(field for field in dataclasses.fields(options) if field.name == name)
    flag, parse = flag_of(name), field.metadata["parse"]
    if parse in (switch, optional_switch):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if value is None:
        return [f"{flag} {'auto' if parse is reshard_policy else 'off'}"]
    if isinstance(value, tuple) and not field.metadata["many"]:
        value = ",".join(map(str, value))
    values = value if field.metadata["many"] else (value,)
    return [f"{flag} {shlex.quote(str(one).lower() if isinstance(one, bool) else str(one))}" for one in values]


def to_flags(config: Any) -> dict[str, Any]:
    """The inverse: each option under its flag's name, as JSON can hold it."""
    return {
        field.name.replace("_", "-"): list(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(config)
        for value in [getattr(config, field.name)]
    }

"""Every command of the packages, with the parser that it really uses."""

from __future__ import annotations

import argparse
import importlib
import inspect
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]
ROOMS = ("fsdp2", "fsdp2_extra", "fsdp2_tools", "fsdp1_interface", "migration", "launchers")
# Programs that are started by others, or read as a page: they take no flags of a user.
WITHOUT_FLAGS = {"fsdp2.minimal", "fsdp2_tools.tune.trial", "fsdp2_tools.doctor.planned_step"}

# Others take the flags of these two.
FIRST, RAY = "python -m fsdp2.train", "python -m launchers.ray_train"


class Found(Exception):
    """Carries a parser out of the command that made it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


def names() -> list[str]:
    """What `python -m` can run: modules whose last lines ask for it."""
    found = [
        source.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__main__")
        for package in ("fsdp2", "fsdp2_tools", "launchers")
        for source in sorted((ROOT / package).rglob("*.py"))
        if 'if __name__ == "__main__"' in source.read_text()
    ]
    return [name.replace("fsdp2_tools.", "fsdp2.") for name in found if name not in WITHOUT_FLAGS]


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser that prints when the command is asked for help."""

    def found(parser: argparse.ArgumentParser, *_: object) -> None:
        raise Found(parser)

    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    takes_words = next(iter(inspect.signature(module.main).parameters)) in ("arguments", "argv")
    start = module.main if takes_words else module.parse
    with mock.patch.object(argparse.ArgumentParser, "print_help", found):
        try:
            start(["--help"])
        except Found as one:
            return one.parser
    raise AssertionError(f"{name} --help printed no help")


def parsers() -> list[argparse.ArgumentParser]:
    """Of each command, or of each of its subcommands where it has some; those whose flags others take come first."""
    found = []
    for name in names():
        parser = parser_of(name)
        below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        found += [one for action in below for one in action.choices.values()] or [parser]
    for one in found:
        one.prog = "python -m " + one.prog.removeprefix("python -m ")
    return sorted(found, key=lambda one: (one.prog != FIRST, one.prog != RAY))

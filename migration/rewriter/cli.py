"""python -m fsdp2.migrate check | rewrite: their arguments and exit status."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any

from fsdp2.options.errors import ConfigError
from fsdp2.units import install

PATHS = "Python files, notebooks, configuration files, or folders of them"
FORMAT_NAMES = ("json", "github", "sarif")  # of `finding`, which is loaded when a command is known
LIBRARIES = {"libcst": "Python", "ruamel.yaml": "YAML"}


def add(commands: argparse._SubParsersAction[Any]) -> None:
    check = commands.add_parser(
        "check",
        help="find every use of FSDP1 in files and folders",
        description="Finds every use of FSDP1. Prints the uses that need a decision, then the imports, and counts the "
        "rest. "
        "Exit status 1 if there is any use, 0 if nothing is left to do.",
    )
    check.add_argument("paths", nargs="+", metavar="PATH", help=PATHS)
    check.add_argument("--all", action="store_true", help="also list what needs no decision, as the other formats do")
    check.add_argument("--format", choices=("text", *FORMAT_NAMES), default="text", help="of the list (default: text)")
    check.set_defaults(run=run_check)
    rewrite = commands.add_parser(
        "rewrite",
        help="rewrite files and folders for FSDP2, and mark what needs a decision",
        description="Prints what it would change, as a unified diff. Give all files of a program together, because it "
        "follows policies and models from one file to another.",
    )
    rewrite.add_argument("paths", nargs="+", metavar="PATH", help=PATHS)
    rewrite.add_argument("--write", action="store_true", help="change the files instead of printing the difference")
    rewrite.set_defaults(run=run_rewrite)


def _need_libraries() -> None:
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name.partition(".")[0]) is None]
    if missing:
        raise ConfigError(
            f"check and rewrite need {' and '.join(missing)} to read {LIBRARIES[missing[0]]}: {install('migrate')}"
        )


def run_check(given: argparse.Namespace) -> int:
    """1 if there is anything left to do."""
    _need_libraries()
    from migration.rewriter.check import everything
    from migration.rewriter.finding import FORMATS, text

    found = everything(given.paths, texts=False)
    printed = text(found.findings, given.all) if given.format == "text" else FORMATS[given.format](found.findings)
    if printed:
        print(printed)
    for note in found.notes:
        print(f"fsdp2: {note}", file=sys.stderr)
    return 1 if found.findings else 0


def run_rewrite(given: argparse.Namespace) -> int:
    """1 if something is left to be decided."""
    _need_libraries()
    from migration.rewriter.apply import rewrite

    return rewrite(given.paths, write_files=given.write)

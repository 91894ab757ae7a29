"""The flags of `prove`, which are read before torch is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

NAME = "prove"


def add_command(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        NAME,
        help="run two programs, or one on one rank and on several, and compare what they do",
        description="Runs BEFORE and AFTER as they are on CPU ranks, and compares what each passes to backward(), its "
        "gradients, its norms and its parameters after each step. Exit status 0: bit-equal, or equal to rounding by a "
        "known cause; 1: different; 2: refused. With --against-one it runs one program on one rank and on --nproc, "
        "at the same global batch, and names what is silently wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("programs", nargs="+", metavar="PROGRAM", help="BEFORE and AFTER, or one with --against-one")
    parser.add_argument("--against-one", action="store_true", help="compare a run on --nproc ranks with one rank's")
    parser.add_argument(
        "--parameters",
        action="store_true",
        help="with --against-one: the gradient's scale and dtypes of each parameter",
    )
    parser.add_argument("--nproc", default="2", metavar="N", help="ranks (default: 2)")
    parser.add_argument("--steps", default="10", metavar="N", help="optimizer steps to record (default: 10)")
    parser.add_argument("--stand-in", action="store_true", help="run programs that ask for a GPU on the CPU")
    few = "with --stand-in: devices that a node has, --nproc a multiple of it (default: --nproc, which is one node)"
    parser.add_argument("--devices-per-node", metavar="N", help=few)
    parser.add_argument("--timeout", default="600", metavar="SECONDS", help="limit of each run (default: 600)")
    parser.add_argument("--json", action="store_true", help="print the verdict as one JSON object")
    parser.add_argument("--keep", metavar="FOLDER", help="keep records and outputs in this new folder")
    parser.epilog = "ARGS after -- go to the programs. With --against-one a number in braces, {64}, is divided by the "
    parser.epilog += "number of ranks."
    parser.set_defaults(run=_run)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own words, and those after -- for the programs."""
    words = list(words)
    if words[:1] != [NAME] or "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _run(given: argparse.Namespace) -> int:
    from migration.prove.cli import run

    return run(given)

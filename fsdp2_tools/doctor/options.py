"""The flags of an examination, without what examines."""

from __future__ import annotations

import argparse

from fsdp2.config import Config
from fsdp2.options.parser import make_parser

DESCRIPTION = "Is this cluster fit to train?"
SECONDS = 10.0  # that a rank has by default to answer a question


def parser(prog: str = "fsdp2.doctor", *, add_help: bool = True) -> argparse.ArgumentParser:
    """The argparse parser of an examination; with `add_help=False` it is a parent for another parser."""
    found = make_parser(Config, prog=prog, description=DESCRIPTION, add_help=add_help)
    own = found.add_argument_group("the examination")
    own.add_argument("--quick", action="store_true", help="a few seconds, as fsdp2.train --doctor does it")
    own.add_argument(
        "--answer-within",
        metavar="SECONDS",
        help=f"for how long a rank may be silent after a question (default: {SECONDS:g})",
    )
    own.add_argument("--json", action="store_true", help="print JSON and nothing else")
    return found

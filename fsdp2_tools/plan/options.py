"""The flags of a plan, without what plans."""

from __future__ import annotations

from typing import Any

from fsdp2.config import Config
from fsdp2.options.parser import make_parser

DESCRIPTION = "Will it fit, and how fast is it?"


def parser(prog: str = "fsdp2.plan", *, add_help: bool = True) -> Any:
    """The argparse parser of a plan; with `add_help=False` it is a parent for another parser."""
    found = make_parser(Config, prog=prog, description=DESCRIPTION, add_help=add_help)
    own = found.add_argument_group("the plan")
    own.add_argument("--ranks", metavar="N,N", help="numbers of ranks to plan for (default: 8)")
    own.add_argument(
        "--gpu", metavar="NAME|FILE.toml", help="what the ranks run on: a name of the table, or a table of your own"
    )
    own.add_argument("--budget", metavar="BYTES", help="memory that a rank may use (default: the GPU's)")
    own.add_argument(
        "--calibration", metavar="FILE", help="the trials.json of fsdp2.tune: rates of --gpu are fitted to it"
    )
    own.add_argument("--tokens", metavar="N", help="say what a training of so many tokens costs in GPU-hours")
    own.add_argument("--search", action="store_true", help="rank settings by their time within the budget")
    own.add_argument("--out", metavar="DIR", help="where a search leaves its results (default: plans/<time>)")
    own.add_argument("--html", metavar="FILE", help="write a page of the plans, with a quarter to four times the batch")
    own.add_argument(
        "--no-advice",
        dest="advice",
        action="store_false",
        help="leave out what other flags would save, or gain; --run-dir keeps none then",
    )
    own.add_argument("--json", action="store_true", help="print JSON, in bytes, and nothing else")
    return found

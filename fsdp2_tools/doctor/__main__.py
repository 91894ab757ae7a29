"""Is this cluster fit to train?  torchrun --nproc_per_node 2 -m fsdp2.doctor

Started as a training is, on the same ranks. Every other flag is one of `fsdp2.train`'s; `--run-dir` and `--device` say
where a run would write and compute.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from fsdp2.config import Config
from fsdp2.options.parser import make_parser, read_values
from fsdp2.options.values import checked, number
from fsdp2.run import ending
from fsdp2_tools.doctor import examine


def parser(prog: str = "fsdp2.doctor", *, add_help: bool = True) -> argparse.ArgumentParser:
    """The argparse parser of an examination; with `add_help=False` it is a parent for another parser."""
    found = make_parser(Config, prog=prog, description=(__doc__ or "").partition("  ")[0], add_help=add_help)
    own = found.add_argument_group("the examination")
    own.add_argument("--quick", action="store_true", help="a few seconds, as fsdp2.train --doctor does it")
    own.add_argument(
        "--answer-within",
        metavar="SECONDS",
        help=f"for how long a rank may be silent after a question (default: {examine.SECONDS:g})",
    )
    own.add_argument("--json", action="store_true", help="print JSON and nothing else")
    return found


def take_own(given: dict[str, Any]) -> dict[str, Any]:
    """The examination's own flags, taken out of a namespace, as arguments of `Options`. Raises ConfigError."""
    seconds = checked("--answer-within", given.pop("answer_within", str(examine.SECONDS)), number(1, 3600))
    # A model that the flags name is one that somebody wants to train.
    step = not given.keys().isdisjoint({"model", "model_size", "config"})
    return {"seconds": seconds, "quick": given.pop("quick", False), "json": given.pop("json", False), "step": step}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of an examination, after it was printed. A collective call."""
    given = vars(parser().parse_args(arguments))
    own = take_own(given)
    return examine.reported(examine.Options(Config(**read_values(Config, given)), **own))


if __name__ == "__main__":
    with ending.exit_status():
        examine.leave(main())

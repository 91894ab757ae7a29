"""The flags of `checkpoint`, which are read before torch is loaded."""

from __future__ import annotations

import argparse
from typing import Any

from fsdp2 import models

NAME = "checkpoint"


def add_command(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    help = "convert a checkpoint of FSDP1, and prove that nothing changed"
    parser: argparse.ArgumentParser = commands.add_parser(NAME, help=help, description=help, allow_abbrev=False)
    parser.add_argument(
        "source", metavar="SRC", help="a file or folder; its format and the program that wrote it are recognised"
    )
    parser.add_argument("out", metavar="DST", help="the new checkpoint's folder; with --to fsdp1-full the new .pt")
    parser.add_argument(
        "--to",
        choices=("fsdp2", "fsdp1-full"),
        default="fsdp2",
        help="fsdp1-full converts back to FSDP1's full state dict (default: fsdp2)",
    )
    parser.add_argument("--optimizer", metavar="FILE", help="where the optimizer is, if it isn't beside the model")
    parser.add_argument("--no-optimizer", action="store_true", help="convert only the weights")
    parser.add_argument("--model-key", metavar="KEY", help="which model to take of several: a key, or a file's name")
    parser.add_argument(
        "--optimizer-names",
        metavar="JSON",
        help="file with a list of parameter names in the optimizer's order, if its state is numbered",
    )
    parser.add_argument(
        "--prove",
        nargs="?",
        const="5",
        metavar="N",
        help="train N steps (bare: 5) with FSDP1 from the source and with FSDP2 from the result, on 2 ranks, and "
        "compare the losses; needs --model",
    )
    parser.add_argument("--model", help=f"{', '.join(models.NAMES)}, or module:factory, a function that returns it")
    parser.add_argument("--model-size", metavar="NAME", help="size of a model of fsdp2.train")
    parser.add_argument("--wrap", metavar="CLASS,…", help="classes of the modules that FSDP1 wrapped, beside the root")
    parser.add_argument(
        "--loss", metavar="MODULE:FUNCTION", help="function of (model, step, rank) that returns the loss, for --prove"
    )
    parser.add_argument("--optimizer-class", metavar="NAME", help="class of torch.optim, where --prove can't find it")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> None:
    from migration.checkpoints.cli import run

    run(given)

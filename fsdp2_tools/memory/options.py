"""The flags of `python -m fsdp2.memory`, without what reads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fsdp2.options.parser import Parser
from fsdp2.options.values import checked, location


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line. Raises ConfigError."""
    parser = Parser(prog="python -m fsdp2.memory", description="Show where a run's memory went.", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="folder or URL of a run that had --memory-snapshot")
    parser.add_argument(
        "--out", metavar="DIR", help="where the pages go (default: the run directory; for a URL, this folder)"
    )
    parser.add_argument("--no-pages", action="store_true", help="print the summary and write no pages")
    options = parser.parse_args(arguments)
    for flag, value in (("RUN", options.run), ("--out", options.out)):
        if value is not None:
            checked(flag, value, location)
    return options

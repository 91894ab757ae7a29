"""`--help` and a refused flag, answered before torch is loaded, which takes seconds."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

from fsdp2.checkpoint.refusal import Refused, refusal
from fsdp2.options.errors import ConfigError
from fsdp2.run.process.variables import TASKS


def answer(parse: Callable[[], object], program: str = "fsdp2") -> None:
    """Parse a command line for its refusals alone: print `--help`, or one line for a ConfigError or Refused, and exit.

    One of several ranks returns at once, and so does one that meets another error: the program parses again, tells the
    other ranks, and explains errors of files.

    Args:
        parse: reads `sys.argv`; it loads no torch before it has refused what it can without.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # where the encoding lacks a sign, as ASCII does ×, it isn't the end
        sys.stdout.reconfigure(errors="replace")
    if any(name in os.environ for name in ("RANK", *TASKS.values())):
        return
    try:
        parse()
    except (ConfigError, Refused) as error:
        print(f"{program}: error: {refusal(str(error))}", file=sys.stderr)
        sys.exit(2)
    except (OSError, RuntimeError):
        return

"""The flags of a search for the fastest, without what searches."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from fsdp2.config import Config
from fsdp2.options.parser import make_parser
from fsdp2.options.values import checked, location, number, whole
from fsdp2.units import byte_count

DESCRIPTION = "Which flags are fastest here?"

# The flags of the search itself, with their defaults, checks and meaning.
OWN: dict[str, tuple[Any, Any, str]] = {
    "nproc": (2, whole(1, 256), "ranks on this machine"),
    "trials": (10, whole(2, 1000), "settings that are tried, the default among them"),
    "steps": (6, whole(1, 10**4), "timed steps of a setting in a round"),
    "minutes": (10.0, number(0, 10**4), "how long it may take; a round that has begun is finished"),
    "plans": (20, whole(2, 10**4), "settings that are planned, of which the best are tried"),
    "gpu": (None, str, "what the ranks run on, as fsdp2.plan takes it; ranks the plans by time (CPU ranks: cpu)"),
    "calibration": (None, location, "the trials.json of an earlier search: begin with rates that it has measured"),
    "budget": (None, byte_count, "bytes that a rank's tensors may take; unset = its share of the memory"),
    "out": (None, location, "where the results go; unset = tuned/<time>"),
}
METAVARS = {"gpu": "NAME|FILE.toml", "calibration": "FILE", "budget": "BYTES", "out": "DIR"}


def parser() -> argparse.ArgumentParser:
    """The argparse parser of a search."""
    found = make_parser(Config, prog="fsdp2.tune", description=DESCRIPTION)
    add_own(found)
    return found


def add_own(parser: argparse.ArgumentParser, names: Iterable[str] = tuple(OWN)) -> None:
    """The search's own flags, in a group of their own."""
    group = parser.add_argument_group("the search")
    for name in names:
        default, _, meaning = OWN[name]
        known = "" if default is None else f" (default: {default:g})"
        group.add_argument(f"--{name}", metavar=METAVARS.get(name, "N"), help=meaning + known)


def take_own(given: dict[str, Any]) -> dict[str, Any]:
    """The search's own options, out of what a parser returned. Raises ConfigError."""
    values = {name: default for name, (default, _, _) in OWN.items()}
    for name, (_, parse, _) in OWN.items():
        if name in given:
            values[name] = checked(f"--{name}", given.pop(name), parse)
    if values["gpu"] is not None:
        from fsdp2_tools.plan.device import gpu  # loads the planner, and with it torch

        values["gpu"] = gpu(values["gpu"])
    return values

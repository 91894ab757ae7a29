"""Which flags are fastest here?  python -m fsdp2.tune --model transformer --nproc 2

Takes the planner's best settings to the ranks of this machine, a few steps each beside the default, and writes the
fastest as a file for `--config`. What is trained stays the same: losses are compared. Every other flag is one of
`fsdp2.train`'s.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsdp2.compare.measure import memory_of_rank
from fsdp2.config import Config
from fsdp2.options.errors import ConfigError, require
from fsdp2.options.parser import make_parser, read_values
from fsdp2.options.values import checked, location, number, whole
from fsdp2.plan.device import Gpu
from fsdp2.plan.device import gpu as find_gpu
from fsdp2.plan.plans import Plan, plan
from fsdp2.plan.search import Setting, choices, lighter, search, varied
from fsdp2.run import runtime
from fsdp2.run.preflight import check_data, check_versions, check_world
from fsdp2.run.rundir import environment
from fsdp2.run.runtime import World
from fsdp2.tune import report
from fsdp2.tune.launch import on_ranks
from fsdp2.tune.rounds import Candidate, halve
from fsdp2.units import byte_count, short

# The flags of the search itself, with their defaults, checks and meaning.
OWN: dict[str, tuple[Any, Any, str]] = {
    "nproc": (2, whole(1, 256), "ranks on this machine"),
    "trials": (10, whole(2, 1000), "settings that are tried, the default among them"),
    "steps": (6, whole(1, 10**4), "timed steps of a setting in a round"),
    "minutes": (10.0, number(0, 10**4), "how long it may take; a round that has begun is finished"),
    "plans": (20, whole(2, 10**4), "settings that are planned, of which the best are tried"),
    "gpu": (None, find_gpu, "what the ranks run on, as fsdp2.plan takes it; ranks the plans by time"),
    "budget": (None, byte_count, "bytes that a rank's tensors may take; unset = its share of the memory"),
    "out": (None, location, "where the results go; unset = tuned/<time>"),
}
ROUNDS = 0.6  # of the minutes: what begins later would leave none for the last round


def main(arguments: Sequence[str] | None = None) -> list[Candidate]:
    """The settings that were tried, the default first, after the results are written to `--out`.

    Raises ConfigError before anything is started.
    """
    options, config = _parse(arguments)
    ranks: int = options["nproc"]
    require("matplotlib", "plots", "the picture")
    check_versions(config)
    check_world(config, World(0, ranks, 0, ranks))
    check_data(config)
    device = runtime.pick_device(config.device, World(0, ranks, 0, ranks)).type
    budget: int = options["budget"] or memory_of_rank(ranks, config.device)
    out = Path(options["out"] or f"tuned/{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: can't be written ({error.strerror}); choose a folder that can") from None
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    planned = _planned(config, ranks, options, budget, device == "cuda", say)
    tried = [_candidate(config, one) for one in planned]
    together = _fit_together(planned, ranks, budget, device)
    say(f"{len(tried)} settings on {ranks} ranks, {'in turn' if together else 'one after the other'}")
    with tempfile.TemporaryDirectory() as folder:
        best = halve(
            tried[0],
            tried[1:],
            on_ranks(ranks, Path(folder), together=together, say=say),
            steps=options["steps"],
            together=together,
            budget=budget,
            time_left=lambda: time.monotonic() - began < ROUNDS * 60 * options["minutes"],
            say=say,
        )
    facts = {
        "command": "python -m fsdp2.tune " + shlex.join(arguments if arguments is not None else sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        **environment(ranks),
        "seconds": round(time.monotonic() - began),
    }
    report.write(tried, best, facts, out)
    print("\n".join([report.table(tried), "", *report.verdict(tried, best)]))
    print(f"train with it: python -m fsdp2.train --config {short((out / report.SETTINGS).absolute())}")
    return tried


def _planned(
    config: Config, ranks: int, options: dict[str, Any], budget: int, on_gpu: bool, say: Callable[[str], None]
) -> list[Setting]:
    """The default, and the best others of the planner's search that fit."""
    gpu: Gpu | None = options["gpu"]
    warnings.simplefilter("ignore")  # torch warns of things that a process without a device does

    def replan(changed: Config, flags: str) -> Plan:
        say(f"planning {flags}")
        return plan(changed, ranks, gpu, budget)

    ways = choices(config, ranks, gpu=on_gpu)
    base = replan(config, "default")
    if base.fits:
        ways = lighter(config, ways)
    found = search(
        config,
        ways,
        lambda changed, flags: base if changed is config else replan(changed, flags),
        most=options["plans"],
    )
    default = next(one for one in found if not one.changes)
    fitting = [one for one in found if one.changes and one.plan.fits]
    if not fitting:
        raise ConfigError("--budget: no setting is planned to fit; python -m fsdp2.plan says what each takes")
    return [default, *varied(fitting, options["trials"] - 1)]


def _candidate(config: Config, one: Setting) -> Candidate:
    time = one.plan.time
    return Candidate(
        one.name,
        dataclasses.replace(config, **one.changes),
        dict(one.changes),
        one.plan.tensors,
        None if time is None else time.milliseconds,
    )


def _fit_together(planned: Sequence[Setting], ranks: int, budget: int, device: str) -> bool:
    """Whether all settings' models and optimizers and the largest of their steps fit into half of the memory."""
    share = min(budget, memory_of_rank(ranks, device))
    held = sum(2 * one.plan.memory.model_bytes + one.plan.memory.optimizer_bytes for one in planned)
    return held + max(one.plan.bytes for one in planned) <= share / 2


def _parse(arguments: Sequence[str] | None) -> tuple[dict[str, Any], Config]:
    """The search's own options, and the training that is to become faster."""
    parser = make_parser(Config, prog="fsdp2.tune", description=(__doc__ or "").partition("  ")[0])
    own = parser.add_argument_group("the search")
    for name, (default, _, meaning) in OWN.items():
        known = "" if default is None else f" (default: {default:g})"
        own.add_argument(f"--{name}", metavar=METAVARS.get(name, "N"), help=meaning + known)
    given = vars(parser.parse_args(arguments))
    values = {name: default for name, (default, _, _) in OWN.items()}
    for name, (_, parse, _) in OWN.items():
        if name in given:
            value = given.pop(name)
            values[name] = parse(value) if name == "gpu" else checked(f"--{name}", value, parse)
    config = Config(**read_values(Config, given))
    if config.strategy != "fsdp2":
        raise ConfigError(
            f"--strategy {config.strategy}: the settings that are tried are FSDP2's; drop it, or compare strategies "
            "with python -m fsdp2.compare"
        )
    return values, config


METAVARS = {"gpu": "NAME|FILE.toml", "budget": "BYTES", "out": "DIR"}


if __name__ == "__main__":
    with runtime.exit_status():
        main()

"""Which flags are fastest here?  python -m fsdp2.tune --model transformer --nproc 2

Takes the planner's best settings to the ranks of this machine, a few steps each beside the default, and writes the
fastest as a file for `--config`. What is trained stays the same: losses are compared. Every other flag is one of
`fsdp2.train`'s.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from fsdp2.run.process import early
from fsdp2_tools.tune.options import parser, take_own

if __name__ == "__main__":
    early.answer(parser().parse_args)

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError, require, shown
from fsdp2.options.own_model import code_flags
from fsdp2.options.parser import read_values
from fsdp2.run.preflight import check_data, check_versions, check_world
from fsdp2.run.process import ending, runtime
from fsdp2.run.process.group import RunStopped
from fsdp2.run.process.runtime import World
from fsdp2.units import short
from fsdp2_tools import results
from fsdp2_tools.compare.measure import memory_of_rank
from fsdp2_tools.compare.report import terminal
from fsdp2_tools.plan.calibration import calibrate, read
from fsdp2_tools.plan.device import Gpu
from fsdp2_tools.plan.device import gpu as find_gpu
from fsdp2_tools.plan.plans import Plan
from fsdp2_tools.plan.search import Setting
from fsdp2_tools.tune import report
from fsdp2_tools.tune.launch import Launch, by_torchrun, on_ranks
from fsdp2_tools.tune.planner import Planner
from fsdp2_tools.tune.rounds import Candidate, halve

ROUNDS = 0.6  # of the minutes: what begins later would leave none for the last round


def main(arguments: Sequence[str] | None = None) -> list[Candidate]:
    """The settings that were tried, the default first, after the results are written to `--out`.

    Raises ConfigError before anything is started.
    """
    given = vars(parser().parse_args(arguments))
    options = take_own(given)
    ranks: int = options["nproc"]
    words = arguments if arguments is not None else sys.argv[1:]
    command = f"python -m fsdp2.tune {shlex.join(words)}"
    return tune(options, Config(**read_values(Config, given)), ranks, by_torchrun(ranks), command)


def tune(options: dict[str, Any], config: Config, ranks: int, launch: Launch, command: str) -> list[Candidate]:
    """Search on ranks that `launch` starts, with options by the names of OWN, and write the results.

    Returns the settings that were tried, the default first. Raises RunStopped if none ran, and ConfigError before
    anything is started.
    """
    check(config, ranks)
    device = runtime.pick_device(config.device, World(0, ranks, 0, ranks)).type
    budget: int = options["budget"] or memory_of_rank(ranks, config.device)
    out = results.folder(options["out"], below="tuned").absolute()
    began, say = time.monotonic(), results.clock()
    warnings.simplefilter("ignore")  # torch warns of things that a process without a device does
    planner = Planner(
        config, ranks, _rates(options, config, device, say), budget, device == "cuda", options["plans"], say
    )
    count: int = options["trials"]
    default, *others = planner.first(count if planner.speed is None else max(1 + count // 2, min(3, count)))
    tried = [_candidate(config, one) for one in (default, *others)]

    def more() -> list[Candidate]:
        found = [_candidate(config, one) for one in planner.further(tried, count - len(tried))]
        tried.extend(found)
        return found

    # Settings of later rounds may be as large as the largest that is planned.
    together = _fit_together(planner.largest(count), ranks, budget, device)
    say(f"up to {count} settings on {ranks} ranks, {'in turn' if together else 'one after the other'}")
    with results.temporary(out) as folder:  # there, since all ranks have to see it
        best = halve(
            tried[0],
            tried[1:],
            on_ranks(launch, folder, together=together, say=say),
            steps=options["steps"],
            together=together,
            budget=budget,
            time_left=lambda: time.monotonic() - began < ROUNDS * 60 * options["minutes"],
            more=more,
            say=say,
        )
    took = {"device": device, "seconds": round(time.monotonic() - began)}
    report.write(tried, best, results.facts(command, ranks) | took, out)
    print("\n".join([terminal(report.HEADINGS, report.cells(tried)), "", *report.verdict(tried, best)]))
    if all(one.failed is not None for one in tried):
        raise RunStopped(f"no setting ran, as {short(out / 'tuned.md')} says of each")
    words = ["--config", short(out / report.SETTINGS), *code_flags(config)]
    print(f"train with it: python -m fsdp2.train {shlex.join(words)}")
    return tried


def check(config: Config, ranks: int) -> None:
    """Raises ConfigError for what can't be tuned on so many ranks."""
    if config.strategy != "fsdp2":
        raise ConfigError(
            f"--strategy {config.strategy}: the settings that are tried are FSDP2's; drop it, or compare strategies "
            "with python -m fsdp2.compare"
        )
    require("matplotlib", "plots", "the picture")
    check_versions(config)
    check_world(config, World(0, ranks, 0, ranks))
    check_data(config)


def _rates(options: dict[str, Any], config: Config, device: str, say: Callable[[str], None]) -> Gpu | None:
    """The device of the ranks: `--gpu`, else the table's CPU; with `--calibration` as fast as its trials were."""
    gpu: Gpu | None = options["gpu"] or (find_gpu("cpu") if device == "cpu" else None)
    place = options["calibration"]
    if place is None:
        return gpu
    if gpu is None or gpu.speed is None:
        raise ConfigError(f"--calibration {shown(place)}: needs a --gpu with rates to fit")
    found = calibrate(gpu, read(place, gpu, config, say))
    say(found.told)
    return found.gpu


def _candidate(config: Config, one: Setting) -> Candidate:
    planned = one.plan.time
    return Candidate(
        one.name,
        dataclasses.replace(config, **one.changes),
        dict(one.changes),
        one.plan.tensors,
        None if planned is None else planned.milliseconds,
    )


def _fit_together(planned: Sequence[Plan], ranks: int, budget: int, device: str) -> bool:
    """Return whether all settings' models and optimizers and the largest of their steps fit into half of the memory."""
    share = min(budget, memory_of_rank(ranks, device))
    held = sum(2 * one.memory.model_bytes + one.memory.optimizer_bytes for one in planned)
    return held + max(one.bytes for one in planned) <= share / 2


if __name__ == "__main__":
    with ending.exit_status():
        main()

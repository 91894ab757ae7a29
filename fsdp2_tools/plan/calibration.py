"""Measurements of `fsdp2.tune`, read back: rates with which plans take the measured times."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError, refused, shown
from fsdp2.options.own_model import require_named
from fsdp2.options.parser import flags_of_table, to_flags
from fsdp2.options.settings_file import read_table
from fsdp2.options.values import LONGEST_PATH
from fsdp2_extra.foreign.bounds import Foreign, run_in_bounds
from fsdp2_tools.plan.device import Gpu
from fsdp2_tools.plan.execute import Runs
from fsdp2_tools.plan.plans import plan
from fsdp2_tools.plan.speed import Speed
from fsdp2_tools.plan.steptime import whole_step

# Rates that are fitted, each as a factor of the table's.
FITTED = ("computing", "memory", "links", "operator", "exchange")
# A rate that no trial tells apart from the others stays where the table has it: to change one by a factor of e costs as
# much as an error of 10 % in one trial.
PULL = 0.1
STEPS = 12  # of the fit; each measures how every rate changes every time
LEAST, MOST = 3, 1000  # trials, of which a search makes no more
LONGEST = 300  # seconds of a processor for planning them: a file may ask for any model on any number of ranks
LEAST_SPREAD = 0.05
Factors = tuple[float, ...]  # natural logarithms of those of FITTED


@dataclass(frozen=True)
class Trial:
    """A setting that was measured on so many ranks: milliseconds of a step, beside what a plan of it is drawn from."""

    config: Config
    ranks: int
    milliseconds: float
    runs: Runs

    def planned(self, speed: Speed) -> float:
        """Milliseconds of a step at these rates."""
        return 1e3 * whole_step(self.config, self.ranks, self.runs, speed).seconds


@dataclass(frozen=True)
class Calibrated:
    """A device with fitted rates, and the median error of the trials' times, as a part, before and after the fit."""

    gpu: Gpu
    trials: int
    before: float
    after: float

    @property
    def told(self) -> str:
        return (
            f"rates of {self.gpu.name} fitted on {self.trials} trials: planned times were off by {self.before:.0%} "
            f"(median), and are by {self.after:.0%}"
        )


def read(place: str, gpu: Gpu, config: Config, say: Callable[[str], None]) -> list[Trial]:
    """The trials of a `trials.json`, executed again without values. Raises ConfigError, in one line.

    It is data, as a run's folder is: code or a URL that a trial names has to be in the configuration that is planned.
    """
    where = f"--calibration {shown(place, LONGEST_PATH)}"
    with refused(where):
        if PurePath(place).suffix != ".json":
            raise ValueError("is no .json file; give the trials.json that fsdp2.tune has written")
        values = read_table(place)
        measured = [*_measured(values)]
    if not LEAST <= len(measured) <= MOST:
        raise ConfigError(f"{where}: has {len(measured)} trials with a time; give {LEAST} to {MOST}, by tune --trials")
    device, wanted = values["facts"].get("device"), "cpu" if gpu.on_cpu else "cuda"
    if device != wanted:
        raise ConfigError(f"{where}: was measured on {shown(str(device))}, and --gpu {gpu.name} is {wanted}")
    say(f"planning the {len(measured)} trials of {place}")
    ranks = values["facts"]["world_size"]
    own, known = to_flags(config), f"{where}, its {len(measured)} trials"

    def executed() -> list[Trial]:
        trials: list[Trial] = []
        for flags, milliseconds in measured:
            same = {name.replace("-", "_"): value for name, value in flags.items() if value == own.get(name)}
            require_named(flags, same, where)
            try:
                one = plan(Config(**flags_of_table(Config, flags, "its flags")), ranks, gpu, None, keep=True)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from None
            assert one.runs is not None, "they are kept"
            trials.append(Trial(one.config, ranks, milliseconds, one.runs))
        return trials

    return run_in_bounds(executed, Foreign(known, ConfigError, "leave fewer, or smaller ones", seconds=LONGEST))


def _measured(values: Mapping[str, Any]) -> list[tuple[dict[str, Any], float]]:
    """Flags and milliseconds of each trial with a time. Raises ValueError with the reason."""
    facts, trials = values.get("facts"), values.get("trials")
    ranks = facts.get("world_size") if isinstance(facts, dict) else None
    if not isinstance(trials, list) or type(ranks) is not int or not 1 <= ranks <= 2**16:
        raise ValueError("holds no trials, or no world_size that they ran on; give the trials.json of fsdp2.tune")
    found = []
    for number, one in enumerate(trials):
        flags = one.get("flags") if isinstance(one, dict) else None
        measured = one.get("measured") if isinstance(one, dict) else None
        if not isinstance(flags, dict) or not isinstance(measured, dict):
            raise ValueError(f"trial {number} has no flags, or no measured; give the trials.json of fsdp2.tune")
        if (time := measured.get("step_ms")) is None:
            continue
        if type(time) not in (int, float) or not 1e-3 <= time <= 1e9:
            raise ValueError(f"step_ms {shown(str(time))} of trial {number}: must be milliseconds, 0.001 or more")
        found.append((flags, float(time)))
    return found


def calibrate(gpu: Gpu, trials: Sequence[Trial]) -> Calibrated:
    """The device with the rates that suit the trials best; its spread is what their times are off by at most."""
    assert gpu.speed is not None, "read and main refuse a device without rates"
    speed = changed(gpu.speed, fit(trials, gpu.speed))
    before, after = ([abs(one.planned(s) / one.milliseconds - 1) for one in trials] for s in (gpu.speed, speed))
    speed = dataclasses.replace(speed, spread=min(0.9, max(LEAST_SPREAD, *after)))
    fitted = dataclasses.replace(gpu, speed=speed)
    return Calibrated(fitted, len(trials), statistics.median(before), statistics.median(after))


def changed(speed: Speed, factors: Factors) -> Speed:
    """Rates multiplied, and times of the CPU divided. None passes what a data sheet allows."""
    computing, memory, links, operator, exchange = (math.exp(factor) for factor in factors)
    by = {"matrix": computing, "attention": computing, "memory": memory, "link": links, "network": links}
    return dataclasses.replace(
        speed,
        efficiency={name: min(1.0, value * by[name]) for name, value in speed.efficiency.items()},
        operator=speed.operator / operator,
        exchange=speed.exchange / exchange,
    )


def fit(trials: Sequence[Trial], speed: Speed) -> Factors:
    """Levenberg and Marquardt's least squares of the logarithms of planned by measured times, and of the factors."""

    def off(factors: Factors) -> torch.Tensor:
        there = changed(speed, factors)
        errors = [math.log(one.planned(there) / one.milliseconds) for one in trials]
        return torch.tensor([*errors, *(PULL * factor for factor in factors)], dtype=torch.float64)

    best: Factors = (0.0,) * len(FITTED)
    here, damping = off(best), 1e-2
    for _ in range(STEPS):
        aside = [(*best[:k], best[k] + 0.05, *best[k + 1 :]) for k in range(len(best))]
        slope = torch.stack([(off(one) - here) / 0.05 for one in aside], dim=1)
        square = slope.T @ slope
        step = torch.linalg.solve(square + damping * torch.diag(square.diagonal() + 1e-9), -slope.T @ here)
        there = tuple(factor + float(part) for factor, part in zip(best, step.clamp(-2, 2), strict=True))
        found = off(there)
        if found.square().sum() < here.square().sum():
            closer = float(here.square().sum() - found.square().sum())
            best, here, damping = there, found, damping / 5
            if closer < 1e-6:
                break
        else:
            damping *= 10
    return best

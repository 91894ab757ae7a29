"""Suspicious values of a run although every one is a number: reported, or by `--on-anomaly stop` its end; and what
`--compile` has done, which is only reported."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from fsdp2.config import Config
from fsdp2.parallel.compiling import Compiled, compiled
from fsdp2.parallel.engine import Engine
from fsdp2.run.checkpoints import Checkpoints, Reports
from fsdp2.run.process import runtime

REMEMBERED, FEWEST = 64, 32  # steps
# What is looked at: its name for users, and how often the median it is at least, if it jumps.
LOOKED_AT = {"loss": ("loss", 1.5), "grad_norm": ("gradient norm", 4.0)}
# Standard deviations of the logarithm, since both scatter in proportion to their size. The median absolute deviation
# estimates them, so that a jump doesn't hide the next one.
DEVIATIONS = 10 * 1.4826


class Anomalies:
    """Jumps of the loss or the gradient norm, and replicas that have become different.

    It is made, and every method called, by all ranks after the same step.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        checkpoints: Checkpoints,
        reports: Reports,
        device: torch.device,
        step: int,
    ) -> None:
        """`step`: until which the run is done already; what is usual is read from the records of its last steps."""
        self._every, self._stops = config.check_replicas, config.on_anomaly == "stop"
        self._engine, self._checkpoints, self._emit, self._device = engine, checkpoints, reports.emit, device
        self._agreed = self._compared = step
        self._compiles = config.compile
        self._compiled: Compiled | None = None
        checkpoints.before_save = self.before_save
        self._jumps = Jumps()
        for record in runtime.broadcast(reports.last_steps(REMEMBERED)):
            self._jumps.look(record)

    def look(self, record: dict[str, Any]) -> None:
        """Report a step whose loss or gradient norm jumps, by its record, the same on all ranks.

        Raises RunStopped if the run is to stop then.
        """
        jump = self._jumps.look(record)
        if jump is None:
            return
        step = record["step"]
        name, what = jump
        self._emit("anomaly", {"step": step, "about": name, "what": what})
        if self._stops:
            advice = "look at that step's data, --lr and --clip-grad-norm, or use --on-anomaly report"
            self._checkpoints.stop(f"step {step}: {what}", "checkpoint before it", step - 1, advice)

    def after_step(self, step: int) -> None:
        """Report what was compiled, after the first step and whenever torch has left out something new; after each
        `--check-replicas` steps compare the replicas and report those that differ. Raises as `look`."""
        if self._compiles:
            now = compiled()
            if self._compiled is None or now.left_out != self._compiled.left_out:
                facts = {"graphs": now.graphs, "left_out": list(now.left_out), "what": str(now)}
                self._emit("compiled", {"step": step, **facts})
                self._compiled = now
        if self._every is not None and step % self._every == 0:
            self._compare(step)

    def before_save(self, step: int) -> None:
        """With `--check-replicas` the same, so that no checkpoint of replicas that differ becomes the newest one."""
        if self._every is not None and self._compared != step:
            self._compare(step)

    def _compare(self, step: int) -> None:
        from fsdp2.run.watch.replicas import compare

        self._compared = step
        held = self._engine.held()
        wrong, what = compare(held["parameters"] + held["optimizer"], self._device)
        if not wrong:
            self._agreed = step
            return
        what += f"; they agreed after step {self._agreed}"
        self._emit("anomaly", {"step": step, "about": "replicas", "what": what, "ranks": wrong})
        if self._stops:
            advice = "examine these hosts (python -m fsdp2.doctor); a resume goes on from that checkpoint"
            self._checkpoints.stop(f"step {step}: {what}", "checkpoint of that time", self._agreed, advice)


class Jumps:
    """The logarithms of what the last steps had, and whether a value is far above them."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=REMEMBERED) for name in LOOKED_AT}
        self._high: dict[str, bool] = {}  # in the last step, so that a level that stays is told once

    def look(self, record: Mapping[str, Any]) -> tuple[str, str] | None:
        """The field of a `train` record that jumps, and a line about it; None if none does.

        Args:
            record: a value that isn't positive, or is no number, as fp16's overflows give and as None stands for in
                metrics.jsonl, is passed over.
        """
        found = []
        for name, (words, times) in LOOKED_AT.items():
            value, recent = record[name], self._recent[name]
            if value is None or not (math.isfinite(value) and value > 0):
                continue
            usual, bound = _usual_and_bound(recent, times)
            high = value > bound
            if high and not self._high.get(name):
                last = f"{usual:.4g} is the median of the last {len(recent)} steps, and {bound:.4g} the bound"
                found.append((name, f"the {words} jumps to {value:.4g}; {last}"))
            self._high[name] = high
            recent.append(math.log(value))
        return found[0] if found else None


def _usual_and_bound(logs: deque[float], times: float) -> tuple[float, float]:
    if len(logs) < FEWEST:
        return math.nan, math.inf
    middle = statistics.median(logs)
    deviation = statistics.median(abs(one - middle) for one in logs)
    return math.exp(middle), math.exp(min(middle + max(math.log(times), DEVIATIONS * deviation), 700.0))

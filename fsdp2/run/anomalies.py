"""Suspicious values of a run although every one is a number: reported, or by `--on-anomaly stop` its end; and what
`--compile` has done, which is only reported."""

from __future__ import annotations

from typing import Any

import torch

from fsdp2.config import Config
from fsdp2.parallel.compiling import Compiled, compiled
from fsdp2.parallel.engine import Engine
from fsdp2.run import runtime
from fsdp2.run.checkpoints import Checkpoints, Reports
from fsdp2.run.jumps import REMEMBERED, Jumps


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
        from fsdp2.run.replicas import compare

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

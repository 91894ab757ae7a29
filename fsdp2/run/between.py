"""Between two steps a run hears of signals, saves and slow ranks, and reports what looks wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp2.config import Config
from fsdp2.run.checkpoints import Checkpoints, Reporting, is_due
from fsdp2.run.process.group import broadcast
from fsdp2.run.process.settings import GarbageCollection
from fsdp2.run.process.signals import StopSignals
from fsdp2.run.watch.hangs import Watch
from fsdp2.run.watch.jumps import REMEMBERED, Jumps

if TYPE_CHECKING:
    from fsdp2.parallel.compiling import Compiled


class Between:
    """Signals, saves in the background, slow ranks, jumps, replicas, what was compiled, and garbage.

    It is made, and every method called, by all ranks after the same step.
    """

    def __init__(
        self,
        config: Config,
        checkpoints: Checkpoints,
        reports: Reporting,
        watch: Watch,
        stop: StopSignals,
        garbage: GarbageCollection,
    ) -> None:
        self._config, self._checkpoints, self._emit = config, checkpoints, reports.emit
        self._watch, self._stop, self._garbage = watch, stop, garbage
        self._compiled: Compiled | None = None
        self._jumps = Jumps()
        if checkpoints.progress.step:
            for record in broadcast(reports.last_steps(REMEMBERED)):  # they say what is usual
                self._jumps.look(record)

    def before_step(self, step: int) -> list[bool]:
        """Begin this step, counted from 1. Returns this rank's votes to stop, which all must hear after the same step:
        for a signal, and for a save that failed."""
        for finding in self._watch.begin_step(step):
            self._emit("anomaly", {"step": step - 1, **finding})
        return [self._stop.reason is not None, self._checkpoints.poll()]

    def after_step(self, step: int, failed: int) -> None:
        """Do what is due after this step.

        Raises SaveFailed if `failed` ranks have seen a save fail, and RunStopped for `--on-anomaly stop`.
        """
        self._checkpoints.stop_if_failed(failed)
        self._garbage.after_step(step)
        if self._config.compile:
            self._report_compiled(step)
        if is_due(self._config.check_replicas, step):
            self._checkpoints.compare_replicas()

    def look(self, record: dict[str, Any]) -> None:
        """Report a step whose loss or gradient norm jumps, by its record, the same on all ranks.

        Raises RunStopped if the run is to stop then.
        """
        if (jump := self._jumps.look(record)) is None:
            return
        step, (name, what) = record["step"], jump
        self._emit("anomaly", {"step": step, "about": name, "what": what})
        if self._config.on_anomaly == "stop":
            advice = "look at that step's data, --lr and --clip-grad-norm, or use --on-anomaly report"
            self._checkpoints.stop(f"step {step}: {what}", "checkpoint before it", step - 1, advice)

    def _report_compiled(self, step: int) -> None:
        """After the first step, and whenever torch has left out something new."""
        from fsdp2.parallel.compiling import compiled

        now = compiled()
        if self._compiled is None or now.left_out != self._compiled.left_out:
            self._emit("compiled", {"step": step, "graphs": now.graphs, "left_out": [*now.left_out], "what": str(now)})
            self._compiled = now

"""Trackers of others as listeners: W&B, MLflow, TensorBoard. Rank 0 writes, each in a thread of its own.

Training never waits for a tracker and never ends with it: a tracker that fails is left out, in a line that names it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from fsdp2.checkpoint.files import Files, publish
from fsdp2.checkpoint.refusal import one_line, refusal
from fsdp2.units import tell

FILE = "tracking.json"
SECONDS = 30.0  # at the end, for what a tracker hasn't taken yet
MOST = 50  # records at once; MLflow takes 1,000 figures

Record = tuple[str, int, dict[str, float]]
"""A kind, a step, and figures by name."""


def run_id(files: Files, *, fresh: bool) -> str:
    """The run's name for itself in all trackers, which its directory keeps; with `fresh` another one.

    It is data: of a file that isn't as this writes it, nothing is used.
    """
    if not fresh and files.size(FILE) is not None:
        with files.open(FILE) as file:
            if kept := re.fullmatch(rb'\{"id": "([0-9a-f]{16})"\}\n', file.read(64)):
                return kept[1].decode()
        tell(f"{FILE} of the run directory holds no id of a tracker's run; --track begins another run there")
    made = secrets.token_hex(8)  # not by `random`, whose state is training's
    publish(files, FILE, json.dumps({"id": made}).encode() + b"\n")
    return made


@dataclass(frozen=True)
class Run:
    """A run as trackers know it. Nobody need have given it a name; a run at a URL has a local folder, too."""

    id: str
    name: str | None
    tags: dict[str, str]
    flags: Mapping[str, Any]
    folder: Path


class WandB:
    """Each of these imports its library when it is made. `open` returns where the tracker's run can be seen."""

    fix = "look at the network, the login and WANDB_BASE_URL, or set WANDB_MODE=offline"

    def __init__(self) -> None:
        os.environ["WANDB_SILENT"] = "true"  # else it may ask in the terminal
        import wandb

        self._wandb = wandb

    def open(self, run: Run, step: int) -> str:
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fsdp2"),
            id=run.id,
            resume="allow",
            name=run.name or run.folder.name,
            tags=[f"{key}={value}" for key, value in run.tags.items()],
            config=dict(run.flags),
            dir=os.environ.get("WANDB_DIR", run.folder),
            reinit="create_new",
            settings=self._wandb.Settings(
                console="off", init_timeout=SECONDS, finish_timeout=SECONDS, finish_timeout_raises=True
            ),
        )
        self._run.define_metric("*", step_metric="step")  # its own counter would drop steps that are done again
        return f"wandb sync {Path(self._run.dir).parent}" if self._run.offline else str(self._run.url)

    def log(self, records: list[Record]) -> None:
        for _, step, figures in records:
            self._run.log({"step": step, **figures})

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MLflow:
    fix = "look at MLFLOW_TRACKING_URI and the server there"

    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder is what needs no server
        import mlflow

        self._mlflow = mlflow

    def open(self, run: Run, step: int) -> str:
        place = os.environ.get("MLFLOW_TRACKING_URI") or (run.folder / "mlruns").as_uri()
        self._client = client = self._mlflow.MlflowClient(place)
        entities = self._mlflow.entities
        if (experiment := os.environ.get("MLFLOW_EXPERIMENT_ID")) is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fsdp2")
            known = client.get_experiment_by_name(name)
            experiment = client.create_experiment(name) if known is None else known.experiment_id
        found = client.search_runs([experiment], f"tags.`fsdp2-id` = '{run.id}'", max_results=1)
        its = (
            found[0]
            if found
            else client.create_run(experiment, run_name=run.name or run.folder.name, tags={"fsdp2-id": run.id})
        )
        self._id, before = its.info.run_id, its.data.params
        client.update_run(self._id, status="RUNNING", name=run.name)
        flags = {flag: str(value) for flag, value in run.flags.items()}
        changed = {f"fsdp2-{flag}": value for flag, value in flags.items() if before.get(flag, value) != value}
        # A parameter can't be changed, so that a flag's later value is a tag. 100 of each are taken at once.
        client.log_batch(self._id, tags=[entities.RunTag(*tag) for tag in (run.tags | changed).items()])
        params = [entities.Param(flag, value) for flag, value in flags.items() if flag not in before]
        for first in range(0, len(params), 100):
            client.log_batch(self._id, params=params[first : first + 100])
        return f"{place}, run {self._id}"

    def log(self, records: list[Record]) -> None:
        now, metric = int(1000 * time.time()), self._mlflow.entities.Metric
        figures = [metric(name, value, now, step) for _, step, some in records for name, value in some.items()]
        self._client.log_batch(self._id, metrics=figures)

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "FAILED")


class TensorBoard:
    fix = "look at the disk"

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter

    def open(self, run: Run, step: int) -> str:
        folder = run.folder / "tensorboard"
        self._writer = self._make(str(folder), purge_step=step + 1)
        words = {"run-name": run.name, "tag": run.tags, "flags": dict(run.flags)}
        self._writer.add_text("run", f"```json\n{json.dumps(words, indent=1)}\n```", step)
        return f"tensorboard --logdir {folder}"

    def log(self, records: list[Record]) -> None:
        for _, step, figures in records:
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, finished: bool) -> None:
        self._writer.close()


CLASSES: dict[str, Callable[[], Any]] = {"wandb": WandB, "mlflow": MLflow, "tensorboard": TensorBoard}


class Trackers:
    """The listener for all trackers of a run."""

    def __init__(self, names: Sequence[str], run: Run, say: Callable[[str], None]) -> None:
        """`say`: is given a line for each tracker about where its run can be seen."""
        self._threads = [_Thread(name, run, say) for name in names]

    def __call__(self, kind: str, data: dict[str, Any]) -> None:
        if kind in ("start", "resume"):
            for thread in self._threads:
                thread.first_step = data["step"]
                thread.start()
        elif kind in ("train", "eval", "end"):
            numbers = {name: value for name, value in data.items() if isinstance(value, (int, float))}
            figures = {f"{kind}/{name}": value for name, value in numbers.items() if name not in ("step", "epoch")}
            for thread in self._threads:
                thread.put((kind, data["step"], figures))

    def close(self) -> None:
        until = time.monotonic() + SECONDS  # of all together
        for thread in self._threads:
            thread.put(None)
        for thread in self._threads:
            thread.wait(until - time.monotonic())


class _Thread(Thread):
    """One tracker's. Its library is imported by who makes it, before there is any: a fork finds no import half done."""

    def __init__(self, name: str, run: Run, say: Callable[[str], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._run, self._say, self.first_step, self._left_out = run, say, 0, False
        self._waiting: SimpleQueue[Record | None] = SimpleQueue()
        try:
            self._tracker = CLASSES[name]()
        except Exception as error:  # a library that is installed may fail all the same
            self._leave_out(one_line(error), f"install the extra {name} again")

    def put(self, record: Record | None) -> None:
        if not self._left_out:
            self._waiting.put(record)

    def wait(self, seconds: float) -> None:
        if self.ident is not None:
            self.join(max(0.0, seconds))
            if self.is_alive():
                self._leave_out(f"it hasn't taken the last figures in {SECONDS:.0f} s", self._tracker.fix)

    def run(self) -> None:
        if self._left_out:
            return
        last: Record | None = None
        try:
            self._say(f"{self.name}: {self._tracker.open(self._run, self.first_step)}")
            while records := self._next():
                self._tracker.log(records)
                last = records[-1]
            self._tracker.close(finished=last is not None and last[0] == "end")
        except BaseException as error:  # a thread ends without a word at SystemExit
            self._leave_out(one_line(error), self._tracker.fix)

    def _next(self) -> list[Record]:
        """The records that wait, at least one; [] at the end."""
        records: list[Record] = []
        while len(records) < MOST and not (records and self._waiting.empty()):
            if (record := self._waiting.get()) is None:
                self._waiting.put(None)
                break
            records.append(record)
        return records

    def _leave_out(self, why: str, fix: str) -> None:
        if not self._left_out:  # what a library says at its end, after it was given up, is no news
            self._left_out = True
            tell(f"--track {self.name}: left out from here on ({refusal(why)}); metrics.jsonl has all figures; {fix}")

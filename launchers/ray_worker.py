"""The program of each of Ray's workers: `fsdp2.train.main`, and a listener that hands its events to Ray."""

from __future__ import annotations

import math
import os
from typing import Any

import ray
import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.report import records
from fsdp2.run.directory.rundir import RunDir
from fsdp2.run.process import runtime
from fsdp2.run.process.group import RunStopped, broadcast
from fsdp2.train import main
from fsdp2_tools.doctor import examine
from fsdp2_tools.doctor.judging import BAD, VERDICTS
from fsdp2_tools.tune import trial
from launchers.ray_console import quiet


def train_worker(job: dict[str, Any]) -> dict[str, Any]:
    """Train. Called by Ray on each worker, with a process group made.

    Args:
        job: `config`, keyword arguments of a Config; `folder` and `environment` (of this project's variables), as
            they were where the run was started; `filesystem`, through which Ray reaches a run at a URL.

    Returns the data of the `end` event; of a run that stops by intention, why, as `stopped`. Raised, that would make
    Ray start it again from the same checkpoint, to the same end.
    """
    _as_started(job)
    config = Config(**job["config"])
    run = RunDir(str(config.run_dir))
    reporter = Reporter(run, job["filesystem"], background=config.async_checkpoint is not None)
    try:
        return main(config, reporter)
    except RunStopped as error:
        return {"stopped": str(error)}


def trial_worker(job: dict[str, Any]) -> None:
    """Take a part in trials of settings. Called by Ray on each worker, with a process group made.

    Args:
        job: `trials`, a job of `fsdp2_tools.tune.trial`; for `folder` and `environment` see `train_worker`.
    """
    _as_started(job)
    trial.main(job["trials"])


def doctor_worker(job: dict[str, Any]) -> dict[str, int]:
    """Take a part in an examination. Called by Ray on each worker, with a process group made.

    `job` has `config`, `folder` and `environment`, see `train_worker`; `examination`, the rest of `doctor`'s Options.
    Raises ConfigError, after the report, if a rank can't train: Ray would wait for one that hangs.
    """
    _as_started(job)
    status = examine.reported(examine.Options(Config(**job["config"]), **job["examination"]))
    if status == VERDICTS.index(BAD):
        raise ConfigError("the cluster can't train, for what the report says is bad")
    return {"status": status}


def _as_started(job: dict[str, Any]) -> None:
    quiet()
    os.environ.pop("OMP_NUM_THREADS", None)  # Ray's: the user's is among those that follow
    os.environ.update(job["environment"])
    if os.path.isdir(job["folder"]):
        os.chdir(job["folder"])  # so that relative paths mean here what they meant where the run was started


def checkpoint_config() -> Any:
    """Ray's CheckpointConfig of this trainer: which of the checkpoints that were reported it keeps.

    Private: a worker's public context lacks its RunConfig. tests/launchers/test_ray_users.py fails when it moves.
    """
    from ray.train.v2._internal.execution.context import get_train_context

    return get_train_context().train_run_context.run_config.checkpoint_config


def kept_in() -> str:
    """The folder of this trainer, its storage path and name. The context's storage is a developer's API of Ray's."""
    return str(ray.train.get_context().get_storage().experiment_fs_path)


def placement() -> dict[str, Any]:
    """Name what Ray has reserved for the workers, as each report of a trial has to: see `ray_tune.gives_back`."""
    group = ray.util.get_current_placement_group()
    return {} if group is None else {"placement_group": group.id.hex()}


class Reporter:
    """A listener: one report to Ray for each checkpoint or evaluation, by all ranks after the same step.

    Each holds what is known by then: `step` and its `epoch`; `epochs` done; `loss`, the mean over the epoch's steps so
    far; `test_loss` and `accuracy` of the last evaluation, and `test_step`, after which that was.

    A report waits for all ranks and for Ray's controller, so there is none for a step. An evaluation waits for
    the checkpoint that follows it, to be one report with that; where none does, its report has no checkpoint, since Ray
    would take an earlier one for what was evaluated. What an asynchronous save has committed is not
    known to all ranks after the same step: it goes with the next report.

    Args:
        filesystem: through which Ray reaches a run at a URL, the second of `ray_train.ray_storage`; None for a folder.
        background: the run has `--async-checkpoint`.

    Raises ConfigError if Ray is to delete checkpoints, which are the run's own: the newest would go, too; or to rank
    them, as it would name those that the run has removed.
    """

    def __init__(self, run: RunDir, filesystem: Any, *, background: bool) -> None:
        asked = checkpoint_config()
        if (kept := asked.num_to_keep) is not None:
            raise ConfigError(
                f"CheckpointConfig(num_to_keep={kept}): Ray would delete the run's own checkpoints; leave that out, "
                f"and give the run's Config keep={kept}"
            )
        if (score := asked.checkpoint_score_attribute) is not None:
            raise ConfigError(
                f"CheckpointConfig(checkpoint_score_attribute={score!r}): the run keeps its checkpoints, and not Ray; "
                "leave that out; keep_best=True in the run's Config keeps the one with the least test_loss"
            )
        if filesystem is None and os.path.realpath(run.path) != os.path.realpath(place := kept_in()):
            why = "Ray takes checkpoints from its storage path and name alone"
            raise ConfigError(f"run_dir {run.path}: {why}; give {place}")
        self.run, self.filesystem, self.background = run, filesystem, background
        self.known = placement()  # what each report holds
        self._losses: list[float] = []  # of the epoch's steps
        self._newest: str | None = None
        self._evaluated = False

    def __call__(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "train" and self._evaluated:
            self._report(data, alone=not self.background)
        self._learn(kind, data)
        if kind == "resume":
            self._resume(data)
        elif kind == "checkpoint":
            self._newest = data["path"]
            if not self.background:
                self._report(data)
        elif kind == "end":
            if broadcast(self.run.has_full_model(data["step"])):
                self._report(data, full_model=str(self.run.files.at(self.run.full_folder.name)))
            self._report(data)  # last, so that this and not the full model is what Ray calls the newest

    def _learn(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "train":
            if data["epoch"] != self.known.get("epoch"):
                self._losses = []
            self._losses.append(data["loss"])
            self.known |= {key: data[key] for key in ("step", "epoch")}
        elif kind == "eval":
            self.known |= {"test_step": data["step"], "test_loss": data["loss"], "accuracy": data["accuracy"]}
            self._evaluated = True

    def _resume(self, data: dict[str, Any]) -> None:
        """Know what a run without a break knows: its file has its records up to the checkpoint, and no later ones."""
        if runtime.world().rank == 0:
            with open(self.run.metrics, "rb") as file:
                for record in filter(None, map(records.parse, file)):
                    self._learn(record["kind"], {k: math.nan if v is None else v for k, v in record.items()})
        known = {key: data[key] for key in ("step", "epoch")} | self.known
        self.known, self._losses, self._evaluated = broadcast((known, self._losses, False))
        if data["checkpoint"].startswith(f"{self.run.store.files}/"):
            self._newest = data["checkpoint"]

    def _report(self, data: dict[str, Any], full_model: str | None = None, *, alone: bool = False) -> None:
        """`data`: of an event before the next step, whose `epoch` is how many are done; `alone`: with no checkpoint."""
        self._evaluated = False
        loss = {"loss": sum(self._losses) / len(self._losses)} if self._losses else {}
        place = None if alone else full_model or broadcast(self._newest)
        ray.train.report(
            {**self.known, **loss, "epochs": data["epoch"]},
            checkpoint=self._at(place) if place else None,
            checkpoint_dir_name="full_model" if full_model else None,
            # It lies where Ray would put it. A second copy would be a second owner.
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )

    def _at(self, place: str) -> Checkpoint:
        """The path of what lies there already, as Ray names it."""
        if self.filesystem is None:
            return Checkpoint.from_directory(place)
        return Checkpoint(place.partition("://")[2], self.filesystem)

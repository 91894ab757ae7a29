"""What Ray is told of a run, and what a search makes of it. Without a cluster."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp2.config import Config
from fsdp2.run.directory.rundir import RunDir
from launchers import ray_train, ray_tune
from launchers.ray_options import RayOptions
from launchers.ray_search import Choice
from launchers.ray_tune import TuneOptions

Event = tuple[str, dict[str, Any]]
Told = Callable[[list[Event]], list[dict[str, Any]]]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    """The reports that a new process makes of events, of a run whose records are those of `metrics.jsonl`."""
    pytest.importorskip("ray.train")
    ray_train.prepare()
    from ray.train import CheckpointConfig

    from launchers import ray_worker

    reports: list[dict[str, Any]] = []

    def report(metrics: dict[str, Any], **_: Any) -> None:
        reports.append(metrics)

    monkeypatch.setattr("ray.train.report", report)
    monkeypatch.setattr(ray_worker, "broadcast", lambda value: value)
    monkeypatch.setattr(ray_worker, "checkpoint_config", CheckpointConfig)
    monkeypatch.setattr(ray_worker, "kept_in", lambda: str(tmp_path))
    monkeypatch.setattr(ray_worker, "placement", dict)

    def listen(events: list[Event]) -> list[dict[str, Any]]:
        reports.clear()
        reporter = ray_worker.Reporter(RunDir(tmp_path), None, background=False)
        for event in events:
            reporter(*event)
        return list(reports)

    return listen


def steps(first: int, last: int, per_epoch: int = 4) -> list[Event]:
    """Steps of a run, each with a loss of its own."""
    return [
        ("train", {"step": n, "epoch": (n - 1) // per_epoch, "loss": 1 / (n + 0.1)}) for n in range(first, last + 1)
    ]


def evaluation(step: int, epoch: int) -> Event:
    return "eval", {"step": step, "epoch": epoch, "loss": 1 / step, "accuracy": step / 100}


def checkpoint(path: Path, step: int, epoch: int) -> Event:
    return "checkpoint", {"step": step, "epoch": epoch, "path": f"{path}/checkpoints/step-{step:08d}"}


def written(run: Path, *events: Event) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps({"kind": kind, **data}) + "\n" for kind, data in events))


def test_reports_count_epochs_done_whatever_their_number(told: Told, tmp_path: Path) -> None:
    """Two epochs of four steps, evaluated after each two, with a checkpoint after each three."""
    events = [*steps(1, 2), evaluation(2, 0), *steps(3, 3), checkpoint(tmp_path, 3, 0), *steps(4, 4), evaluation(4, 0)]
    events += [*steps(5, 6), evaluation(6, 1), checkpoint(tmp_path, 6, 1), *steps(7, 8), evaluation(8, 1)]
    events += [checkpoint(tmp_path, 8, 2), ("end", {"step": 8, "epoch": 2})]
    reports = told(events)
    assert [(one["step"], one["epochs"], one["test_step"]) for one in reports] == [
        (2, 0, 2),
        (3, 0, 2),
        (4, 1, 4),
        (6, 1, 6),
        (8, 2, 8),
        (8, 2, 8),
    ]


def test_an_evaluation_has_no_checkpoint_of_another_step(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's best checkpoint would be one that was never evaluated, or is removed."""
    found = []

    def report(metrics: dict[str, Any], checkpoint: Any, **_: Any) -> None:
        found.append((metrics["step"], checkpoint and Path(checkpoint.path).name))

    monkeypatch.setattr("ray.train.report", report)
    events = [*steps(1, 2), checkpoint(tmp_path, 2, 0), *steps(3, 4), evaluation(4, 0), *steps(5, 5)]
    told([*events, ("end", {"step": 5, "epoch": 1})])
    assert found == [(2, "step-00000002"), (4, None), (5, "step-00000002")]


def test_each_report_holds_what_is_known(told: Told, tmp_path: Path) -> None:
    """A Tuner that chooses by the loss ends at a report without it."""
    (tmp_path / "full_model").mkdir()
    (tmp_path / "full_model" / "full-model.pt").touch()
    events = [*steps(1, 4), evaluation(4, 0), checkpoint(tmp_path, 4, 1), *steps(5, 6), checkpoint(tmp_path, 6, 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDir, "has_full_model", lambda self, step: True)
        at_four, at_six, full, last = told([*events, ("end", {"step": 6, "epoch": 1})])
    assert set(at_four) == {"step", "epoch", "epochs", "loss", "test_step", "test_loss", "accuracy"}
    assert (at_six["accuracy"], at_six["test_step"]) == (0.04, 4)
    assert full == last == at_six


@pytest.mark.parametrize("at", [3, 4, 6])
def test_a_resumed_run_reports_what_one_without_a_break_does(told: Told, tmp_path: Path, at: int) -> None:
    saved = [checkpoint(tmp_path, step, step // 4) for step in (3, 4, 6)]
    events = [*steps(1, 3), saved[0], *steps(4, 4), evaluation(4, 0), saved[1], *steps(5, 6), saved[2], *steps(7, 8)]
    events += [evaluation(8, 1), ("end", {"step": 8, "epoch": 2})]
    until = events.index(checkpoint(tmp_path, at, at // 4)) + 1
    before, whole = told(events[:until]), told(events)
    resume = "resume", {"step": at, "epoch": at // 4, "checkpoint": events[until - 1][1]["path"]}
    written(tmp_path, *events[:until], resume)
    assert told([resume, *events[until:]]) == whole[len(before) :]
    assert told([resume, ("end", {"step": at, "epoch": at // 4})]) == before[-1:]


def test_a_loss_that_was_no_number_is_none_after_a_resume(told: Told, tmp_path: Path) -> None:
    resume = "resume", {"step": 1, "epoch": 0, "checkpoint": f"{tmp_path}/checkpoints/step-00000001"}
    written(tmp_path, ("train", {"step": 1, "epoch": 0, "loss": None}), resume)
    (report,) = told([resume, *steps(2, 2), checkpoint(tmp_path, 2, 0)])
    assert math.isnan(report["loss"])


def test_a_run_that_goes_on_from_another_ones_checkpoint_knows_its_place(told: Told, tmp_path: Path) -> None:
    resume = "resume", {"step": 6, "epoch": 1, "checkpoint": "/another/checkpoints/step-00000006"}
    written(tmp_path, resume)
    assert told([resume, ("end", {"step": 6, "epoch": 1})]) == [{"step": 6, "epoch": 1, "epochs": 1}]


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What a search asks of Ray Tune."""
    pytest.importorskip("ray.tune")
    ray_train.prepare()
    monkeypatch.setattr(ray_train, "resources", lambda: {"CPU": 4})
    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray_tune, "run_trials", lambda *_, **settings: asked.update(settings))

    def search(epochs: int, **options: Any) -> dict[str, Any]:
        space = {"lr": Choice("uniform", (1, 2))}
        asked_for = TuneOptions(search=("lr=uniform(1, 2)",), **options)
        ray_tune.search(asked_for, RayOptions(), Config(epochs=epochs, run_dir="/r"), space, "/s", "n")
        return asked

    return search


def result_of(scheduler: Any, name: str, epochs: int, accuracy: float) -> str:
    trial = SimpleNamespace(trial_id=name)
    result = {"epochs": epochs, "accuracy": accuracy}
    decision: str = scheduler.on_trial_result(None, trial, result)
    return decision


def test_trials_are_stopped_by_epochs_and_none_at_its_end(tuner: Callable[..., dict[str, Any]]) -> None:
    scheduler = tuner(epochs=4)["scheduler"]
    scheduler.set_search_properties("accuracy", "max")
    for name in ("good", "bad"):
        scheduler.on_trial_add(None, SimpleNamespace(trial_id=name, config={}, local_path=""))
    for _ in range(30):  # evaluations within the first epoch, which any trial may have as many of as it likes
        assert result_of(scheduler, "good", 0, 0.9) == "CONTINUE"
        assert result_of(scheduler, "bad", 0, 0.1) == "CONTINUE"
    assert [result_of(scheduler, "good", epochs, 0.9) for epochs in (1, 2, 3, 4)] == ["CONTINUE"] * 4
    assert result_of(scheduler, "bad", 1, 0.1) == "STOP"
    # One that is done writes its full model.
    scheduler.on_trial_add(None, SimpleNamespace(trial_id="late", config={}, local_path=""))
    assert result_of(scheduler, "late", 1, 0.95) == "CONTINUE"
    assert result_of(scheduler, "late", 4, 0.1) == "CONTINUE"


@pytest.mark.parametrize(("epochs", "options"), [(1, {}), (3, {"grace": 3}), (3, {"stop_early": False})])
def test_there_is_no_scheduler_where_no_trial_may_be_stopped(
    tuner: Callable[..., dict[str, Any]], epochs: int, options: dict[str, Any]
) -> None:
    assert tuner(epochs=epochs, **options)["scheduler"] is None


def test_an_evaluation_is_told_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray.tune")
    ray_train.prepare()
    from ray.tune.integration.ray_train import TuneReportCallback

    forwarded: list[int] = []
    monkeypatch.setattr(TuneReportCallback, "__init__", lambda self: None)
    monkeypatch.setattr(
        TuneReportCallback, "after_report", lambda self, context, metrics, checkpoint: forwarded.append(metrics[0])
    )
    callback = ray_tune.reports_to_tune()
    lines = ray_tune.gives_back("accuracy")
    trial = SimpleNamespace(trial_id="a", config={"lr": 0.1})
    for step, tested in [(10, None), (20, None), (45, 45), (50, 45), (45, 45), (90, 90), (90, 90), (60, 45), (95, 95)]:
        known = {} if tested is None else {"test_step": tested, "accuracy": tested / 100}
        callback.after_report(None, [{"step": step, "epoch": (step - 1) // 45, **known}], None)
    for result in forwarded:
        lines.on_trial_result(0, [], trial, result)
    assert capsys.readouterr().out.splitlines() == [
        "a  epoch 1  step 45  accuracy 0.4500  --lr 0.1",
        "a  epoch 2  step 90  accuracy 0.9000  --lr 0.1",
        "a  epoch 3  step 95  accuracy 0.9500  --lr 0.1",
    ]

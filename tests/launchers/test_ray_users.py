"""Through Ray, as its users write it: a trainer of their own, and their trackers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import losses
from tests.launchers.through_ray import kill_at, losses_in, through_ray
from tests.test_resume import metrics_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

PAGE = (Path(__file__).parents[2] / "docs" / "ray.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)  # a trainer, a Tuner around it, a loop on a Dataset
Train = Callable[..., list[tuple[str, dict[str, Any]]]]


def test_a_trainer_of_ones_own_has_torchruns_losses_and_resumes(train: Train, tmp_path: Path) -> None:
    expected = losses(train("--threads=1", run="torchrun", steps=8))
    source = BLOCKS[0]
    given = {"device": "cpu", "threads": 1, "batch_size": 16, "model_size": "tiny", "epochs": 50, "checkpoint_every": 1}
    for steps in (6, 8):  # the second one goes on, where the first checkpoints are removed
        text = source.replace('"/shared/runs"', repr(str(tmp_path)))
        text = text.replace('"max_steps": 200', f'"max_steps": {steps}, **GIVEN')
        names: dict[str, Any] = {"GIVEN": given}
        exec(text, names)
        assert len(losses_in(tmp_path / "mine")) == steps
        assert names["result"].metrics["step"] == steps
        assert names["result"].checkpoint.path.endswith(f"step-{steps:08d}")
    assert losses_in(tmp_path / "mine") == expected
    keeping = text.replace("RunConfig(", "RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=1), ").replace(
        "import FailureConfig", "import CheckpointConfig, FailureConfig"
    )
    with pytest.raises(Exception, match=r"CheckpointConfig\(num_to_keep=1\): Ray would delete the run's own"):
        exec(keeping.replace("max_failures=2", "max_failures=0"), {"GIVEN": given})
    assert sorted(one.name for one in (tmp_path / "mine" / "checkpoints").iterdir())[-1] == "step-00000008"
    by_score = keeping.replace("num_to_keep=1", "checkpoint_score_attribute='accuracy'")
    with pytest.raises(Exception, match=r"checkpoint_score_attribute='accuracy'\): the run keeps its checkpoints"):
        exec(by_score.replace("max_failures=2", "max_failures=0"), {"GIVEN": given})
    elsewhere = text.replace("str(runs / name)}", "str(runs / 'other')}").replace("max_failures=2", "max_failures=0")
    with pytest.raises(Exception, match=f"other: Ray takes checkpoints from its .* alone; give {tmp_path / 'mine'}"):
        exec(elsewhere, {"GIVEN": given})


@pytest.mark.slow
def test_trackers_are_one_run_after_a_worker_was_killed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tests.test_trackers import _board

    killer = kill_at(tmp_path / "run", 5, 1)
    flags = ["--model=cnn", "--checkpoint-every=2", "--track=tensorboard", "--run-name=mine", "--no-save-model"]
    through_ray(tmp_path / "run", *flags, steps=20)
    killer.join(timeout=10)
    assert "resume" in [record["kind"] for record in metrics_of(tmp_path / "run")], "it was not restarted"
    known = dict(enumerate(losses_in(tmp_path / "run"), 1))
    assert {one.step: one.value for one in _board(tmp_path / "run").Scalars("train/loss")} == pytest.approx(known)


@pytest.mark.slow
def test_a_tuner_of_ones_own_chooses_by_the_loss(tmp_path: Path) -> None:
    names: dict[str, Any] = {"runs": tmp_path, "SMALL": {"threads": 1, "batch_size": 64, "model_size": "tiny"}}
    exec(BLOCKS[0].partition("\nruns, name")[0], names)
    exec(BLOCKS[1].replace("**sampled}", "**sampled, **SMALL, 'checkpoint_every': 10}"), names)
    results = names["results"]
    assert [one.error for one in results] == [None, None]
    assert results.get_best_result().config == {"lr": 1e-3}
    for one in results:
        epoch = losses_in(tmp_path / one.metrics["trial_id"])[-23:]
        assert one.metrics["loss"] == sum(epoch) / 23
        assert list(one.metrics_dataframe["epochs"]) == [0, 0, 1, 1, 1, 2, 2, 2]
        assert list(one.metrics_dataframe["step"]) == [10, 20, 23, 30, 40, 46, 46, 46]


@pytest.mark.slow
def test_a_tuner_with_a_scheduler_goes_on_behind_a_trial_that_it_stops(tmp_path: Path) -> None:
    """Each trial needs the CPUs of the one before it, which had its processes killed."""
    names: dict[str, Any] = {"runs": tmp_path, "SMALL": {"threads": 1, "batch_size": 64, "model_size": "tiny"}}
    exec(BLOCKS[0].partition("\nruns, name")[0], names)
    text = (
        BLOCKS[1]
        .replace("**sampled}", "**sampled, **SMALL, 'epochs': 4}")
        .replace("[1e-3, 1e-6]", "[1e-3, 1e-6, 1e-7]")
    )
    asha = "tune.schedulers.ASHAScheduler(time_attr='epochs', max_t=4, grace_period=1, reduction_factor=2)"
    exec(text.replace("max_concurrent_trials=1", f"max_concurrent_trials=1, scheduler={asha}"), names)
    epochs = sorted(one.metrics["epochs"] for one in names["results"])
    assert (epochs[0], epochs[-1]) == (1, 4)


RECORD = """
            import json, os, signal
            with open(f"{job['run']}-{dist.get_rank()}.jsonl", "a") as file:
                file.write(json.dumps([step, total.item(), batch["id"].tolist()]) + "\\n")
            once = Path(job["run"] + "-kill")
            if step == 12 and dist.get_rank() == 1 and once.exists():
                once.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_loop_of_ones_own_on_a_dataset_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def late(rows: dict[str, Any]) -> dict[str, Any]:
        """The first block takes longest, so that without `preserve_order` it doesn't come first."""
        time.sleep(2.0 if rows["id"][0] == 0 else 0.0)
        return rows

    def steps_of(name: str, times: int = 1) -> list[list[Any]]:
        """What each rank does: step, loss and rows."""
        text = BLOCKS[2].replace('"/shared/runs"', repr(str(tmp_path))).replace("on-a-dataset", name)
        text = text.replace("            if step % 5 == 0:", f"{RECORD}            if step % 5 == 0:")
        text = text.replace("override_num_blocks=8)", "override_num_blocks=8).map_batches(late)")
        for _ in range(times):
            names: dict[str, Any] = {"late": late}
            exec(text, names)
        if times == 1:
            assert names["result"].metrics["step"] == 20
            assert names["result"].checkpoint.path.endswith("step-00000020")
        files = (tmp_path / f"{name}-{rank}.jsonl" for rank in (0, 1))
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    whole = steps_of("whole")
    (tmp_path / "killed-kill").touch()
    killed = steps_of("killed", 2)  # the second time there is nothing left to do
    assert not (tmp_path / "killed-kill").exists()
    for steps, again in zip(whole, killed, strict=True):
        assert [step for step, *_ in steps] == list(range(1, 21))
        for epoch in (steps[:10], steps[10:]):
            rows = [row for *_, batch in epoch for row in batch]
            assert rows == sorted(rows)
        assert [step for step, *_ in again] in ([*range(1, n + 1), *range(11, 21)] for n in (11, 12))
        assert all(one == steps[one[0] - 1] for one in again)
    assert sorted(row for steps in whole for *_, batch in steps[:10] for row in batch) == list(range(400))


@pytest.mark.slow
def test_ray_keeps_the_best_checkpoints_of_such_a_loop(tmp_path: Path) -> None:
    text = BLOCKS[2].replace('"/shared/runs"', repr(str(tmp_path))).replace('"keep": 2', '"keep": 10**6')
    best = 'checkpoint_config=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", '
    text = text.replace("failure_config=", f'{best}checkpoint_score_order="min"), failure_config=')
    text = text.replace("import DataConfig,", "import CheckpointConfig, DataConfig,")
    text = text.replace("            if step % 5 == 0:", f"{RECORD}            if step % 5 == 0:")
    (tmp_path / "on-a-dataset-kill").touch()
    names: dict[str, Any] = {}
    exec(text, names)
    assert not (tmp_path / "on-a-dataset-kill").exists()
    kept = sorted(one.name for one in (tmp_path / "on-a-dataset" / "checkpoints").glob("step-*"))
    assert names["result"].checkpoint.path.endswith("step-00000020")
    assert "step-00000020" in kept
    assert len(kept) <= 3  # the best two, and the newest

"""Through Ray, as its users write it: a trainer of their own, and their trackers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import losses
from tests.launchers.through_ray import kill_at, losses_in, through_ray
from tests.test_resume import metrics_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

PAGE = (Path(__file__).parents[2] / "docs" / "ray.md").read_text()
Train = Callable[..., list[tuple[str, dict[str, Any]]]]


def test_a_trainer_of_ones_own_has_torchruns_losses_and_resumes(train: Train, tmp_path: Path) -> None:
    expected = losses(train("--threads=1", run="torchrun", steps=8))
    (source,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "TorchTrainer" in block)
    given = {"device": "cpu", "threads": 1, "batch_size": 16, "model_size": "tiny", "epochs": 50, "checkpoint_every": 1}
    for steps in (6, 8):  # the second one goes on, where the first checkpoints are removed
        text = source.replace('"/shared/runs"', repr(str(tmp_path)))
        names: dict[str, Any] = {"GIVEN": given}
        exec(text.replace('"max_steps": 200', f'"max_steps": {steps}, **GIVEN'), names)
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

"""DeepSpeed's strategies through Ray: the same losses as under torchrun, a worker killed, a run resumed elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import losses, of_kind
from tests.launchers import notebooks
from tests.launchers.test_ray_train import goes_on_after_a_kill
from tests.launchers.through_ray import losses_in, through_ray
from tests.test_zero import STAGES, needs_deepspeed, zero

__all__ = ["zero"]  # a fixture

pytestmark = [pytest.mark.ray, needs_deepspeed]

Train = Callable[..., list[tuple[str, dict[str, Any]]]]
NOTEBOOK = notebooks.DOCS / "deepspeed_tutorial.ipynb"


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_those_of_torchrun(zero: Train, tmp_path: Path, stage: str) -> None:
    flags = [f"--strategy={stage}", "--checkpoint-every=2"]
    expected = losses(zero(*flags, run="torchrun"))
    result = through_ray(tmp_path / "ray", *flags)
    assert losses_in(tmp_path / "ray") == expected
    assert result.metrics["step"] == 6
    assert (tmp_path / "ray" / "deepspeed.json").is_file()


@pytest.mark.usefixtures("cluster")
def test_a_killed_worker_is_started_again(zero: Train, tmp_path: Path) -> None:
    goes_on_after_a_kill(zero, tmp_path, "--strategy=zero3", which=1)


@pytest.mark.usefixtures("cluster")
def test_fsdp2_goes_on_with_a_run_of_zero_through_ray(train: Train, tmp_path: Path) -> None:
    flags = ["--model=cnn", "--global-batch-size=24"]
    whole = losses(train(*flags, run="whole", steps=6))
    through_ray(tmp_path / "run", *flags, "--strategy=zero3", steps=4)
    assert losses_in(tmp_path / "run") == whole[:4]
    events = train(*flags, steps=6)
    assert of_kind(events, "resume")[0]["step"] == 4
    assert losses(events) == whole[4:]
    three = through_ray(tmp_path / "run", *flags, "--strategy=zero2", steps=8, workers=3)
    assert three.metrics["step"] == 8


def test_what_the_notebook_shows_was_run() -> None:
    notebook = notebooks.was_run(NOTEBOOK)
    assert notebooks.pictures(notebook) == 1
    assert "zero1: losses equal to fsdp2's" in notebooks.printed(notebook)


def test_the_notebook_runs() -> None:
    notebook = notebooks.run(NOTEBOOK, 'flags = ["--num-workers=2", "--max-steps=3", "--device=cpu"]')
    assert notebooks.pictures(notebook) == 1
    text = notebooks.printed(notebook)
    assert "zero1: losses equal to fsdp2's" in text
    assert "zero2: losses equal to fsdp2's" in text
    assert "step-00000003" in text
    assert "samples right" in text

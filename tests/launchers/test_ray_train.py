"""Through Ray: the same losses and run directory as under torchrun, workers that are started again, refusals."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.store import Store, verify
from fsdp2.options import ConfigError
from fsdp2.rundir import WriterLock
from launchers import ray_train
from tests.harness import full_files, losses, of_kind, same, small
from tests.test_resume import metrics_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

Train = Callable[..., list[tuple[str, dict[str, Any]]]]


def losses_in(run: Path) -> list[float]:
    return [record["loss"] for record in metrics_of(run) if record["kind"] == "train"]


def through_ray(run: Path, *flags: str, workers: str = "2", steps: int = 6) -> Any:
    return ray_train.main([*small(run, f"--max-steps={steps}", *flags), f"--num-workers={workers}"])


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--model=cnn --checkpoint-every=2",
        "--model=transformer --grad-accumulation=2",
        "--config=configs/all-savers.toml --model-size=tiny",
        "--explicit-prefetching --dcp-api --async-checkpoint --checkpoint-every=2",
    ],
)
def test_losses_are_those_of_torchrun(train: Train, tmp_path: Path, flags: str) -> None:
    expected = losses(train(*flags.split(), run="torchrun"))
    result = through_ray(tmp_path / "ray", *flags.split())
    assert losses_in(tmp_path / "ray") == expected
    assert same(full_files(tmp_path / "ray"), full_files(tmp_path / "torchrun"))
    store = Store(LocalFiles(tmp_path / "ray" / "checkpoints"))
    assert result.checkpoint.path == str(store.checkpoint(6))
    assert result.metrics["step"] == 6
    assert 0 <= result.metrics["accuracy"] <= 1
    for step in store.committed():
        verify(store.checkpoint(step))


def test_each_launcher_resumes_the_others_runs(train: Train, tmp_path: Path) -> None:
    flags = ["--global-batch-size=24"]
    whole = losses(train(*flags, run="whole", steps=6))
    train(*flags, steps=2)
    through_ray(tmp_path / "run", *flags, steps=4)
    assert losses_in(tmp_path / "run") == whole[:4]
    events = train(*flags, steps=6)
    assert of_kind(events, "resume")[0]["step"] == 4
    assert losses(events) == whole[4:]
    result = through_ray(tmp_path / "run", *flags, steps=7, workers="3")
    assert result.metrics["step"] == 7
    through_ray(tmp_path / "run", *flags, steps=8, workers="1")
    assert len(losses_in(tmp_path / "run")) == 8


def test_a_finished_run_says_so(tmp_path: Path) -> None:
    through_ray(tmp_path / "run", steps=2)
    before = metrics_of(tmp_path / "run")
    result = through_ray(tmp_path / "run", steps=2)
    assert result.return_value["reason"] == "already finished"
    assert result.checkpoint.path.endswith("step-00000002")
    assert losses_in(tmp_path / "run") == [record["loss"] for record in before if record["kind"] == "train"]


def workers_of_ray() -> list[int]:
    """Process ids, in the order in which they were started."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                line = (process / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if re.match(rb"ray::\S*TrainWorker", line) or b"ray::RayTrainWorker" in line:
                found.append(int(process.name))
    return sorted(found)


def kill_at(run: Path, step: int, which: int) -> threading.Thread:
    """Kill one of Ray's workers with SIGKILL as soon as a run has done a step."""

    def watch() -> None:
        ended = threading.Event()
        while not ended.wait(0.01):
            metrics = run / "metrics.jsonl"
            if metrics.is_file() and f'"step":{step},' in metrics.read_text().replace(" ", ""):
                os.kill(workers_of_ray()[which], signal.SIGKILL)
                ended.set()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_worker_is_started_again_and_goes_on_bit_for_bit(train: Train, tmp_path: Path, which: int) -> None:
    flags = ["--checkpoint-every=2", "--model=cnn"]
    expected = losses(train(*flags, run="whole", steps=30))
    killer = kill_at(tmp_path / "run", 5, which)
    result = through_ray(tmp_path / "run", *flags, steps=30)
    killer.join(timeout=10)
    assert not killer.is_alive()
    assert losses_in(tmp_path / "run") == expected
    assert of_kind([(r["kind"], r) for r in metrics_of(tmp_path / "run")], "resume"), "it was not restarted"
    assert result.metrics["step"] == 30


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--num-workers 64", "--num-workers 64: Ray has 4 CPU, and each worker takes one"),
        ("--use-gpu yes", "--use-gpu yes with 2 workers: Ray sees 0 GPU"),
        ("--strategy none", "--strategy none with 2 ranks"),
    ],
)
def test_bad_input_is_refused_before_anything_is_started(tmp_path: Path, flags: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ray_train.main([f"--run-dir={tmp_path / 'run'}", "--device=cpu", *flags.split()])
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_name_in_use_is_refused(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path / "run")
    with pytest.raises(ConfigError, match="in use by a run that is still going"):
        through_ray(tmp_path / "run")
    lock.release()


def test_an_address_that_does_not_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--address 127.0.0.1:1: nothing answers there"):
        ray_train.check_address("127.0.0.1:1")

"""Through Ray: the same losses and run directory as under torchrun, workers that are started again, refusals."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.store import Store, verify
from fsdp2.options.errors import ConfigError
from fsdp2.run.directory.lock import WriterLock
from fsdp2.run.process.group import RunStopped
from fsdp2_extra.allocations.timeline import file_name
from launchers import ray_train
from tests.harness import full_files, losses, of_kind, same
from tests.launchers.through_ray import kill_at, losses_in, through_ray
from tests.test_nonfinite import DIVERGES
from tests.test_resume import metrics_of

pytestmark = pytest.mark.usefixtures("cluster")

Train = Callable[..., list[tuple[str, dict[str, Any]]]]


def test_losses_reports_and_artifacts(train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Upstream's hang of FSDP2 under Ray (https://github.com/ray-project/ray/issues/57860) would be a time-out here."""
    flags = ["--checkpoint-every=2", "--global-batch-size=24"]
    expected = losses(train(*flags, run="torchrun"))
    result = through_ray(tmp_path / "ray", *flags, "--memory-snapshot")
    assert losses_in(tmp_path / "ray") == expected
    assert same(full_files(tmp_path / "ray"), full_files(tmp_path / "torchrun"))

    store = Store(LocalFiles(tmp_path / "ray" / "checkpoints"))
    assert result.checkpoint.path == str(store.checkpoint(6))
    assert store.committed() == [2, 4, 6]
    for step in store.committed():
        verify(store.checkpoint(step))
    (evaluation,) = of_kind([(r["kind"], r) for r in metrics_of(tmp_path / "ray")], "eval")
    assert {key: result.metrics[key] for key in ("step", "epoch", "test_loss", "accuracy")} == {
        "step": 6,
        "epoch": 0,
        "test_loss": evaluation["loss"],
        "accuracy": evaluation["accuracy"],
    }
    assert result.metrics["loss"] == pytest.approx(sum(expected) / 6, rel=1e-15)  # summed in another order
    # One report for each checkpoint, one for the full model, and a last one that names the newest step again.
    assert list(result.metrics_dataframe["step"]) == [2, 4, 6, 6, 6]
    folders = Counter(Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints)
    assert folders["full_model"] == 1

    listed = capfd.readouterr().out.partition(f"artifacts in {tmp_path / 'ray'}:")[2]
    for name in (
        "checkpoints/step-00000006/",
        "full_model/full-model.pt",
        "metrics.jsonl",
        ray_train.SNAPSHOT,
        file_name(1),
    ):
        assert f"  {name}  " in listed

    # And torchrun goes on from there, on fewer and on more ranks.
    for ranks in (1, 3):
        shutil.copytree(tmp_path / "ray", tmp_path / f"on-{ranks}")
        events = train(*flags, run=f"on-{ranks}", n=ranks, steps=8)
        assert of_kind(events, "resume")[0]["step"] == 6
        assert len(losses_in(tmp_path / f"on-{ranks}")) == 8


@pytest.mark.ray
@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_of_torchrun_goes_on_through_ray(train: Train, tmp_path: Path, workers: int) -> None:
    flags = ["--global-batch-size=24"]
    train(*flags, steps=4)
    expected = losses(train(*flags, run="whole", steps=8, n=workers))
    result = through_ray(tmp_path / "run", *flags, steps=8, workers=workers)
    assert result.metrics["step"] == 8
    records = [record for record in metrics_of(tmp_path / "run") if record["kind"] == "train"]
    assert [record["step"] for record in records] == list(range(1, 9))
    assert {record["samples"] for record in records} == {24}
    # Four of its steps were done on two ranks, whose sums are rounded in another order.
    assert losses_in(tmp_path / "run") == pytest.approx(expected, rel=1e-4)


@pytest.mark.ray
def test_a_killed_worker_is_started_again_and_goes_on_bit_for_bit(train: Train, tmp_path: Path) -> None:
    goes_on_after_a_kill(train, tmp_path, which=1)


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_with_a_worker_that_stands_still_is_started_again(train: Train, tmp_path: Path) -> None:
    """The watch ends the other worker, which Ray takes for a failure; it ends the one that stands still itself."""
    # Long before the next save, which may take its time.
    fault = {"which": 1, "number": signal.SIGSTOP, "every": 60, "at": 65, "steps": 130}
    goes_on_after_a_kill(train, tmp_path, "--timeout=2", **fault)
    assert "rank " in (tmp_path / "run" / "hang.txt").read_text()


def goes_on_after_a_kill(
    train: Train,
    folder: Path,
    *further: str,
    which: int,
    number: int = signal.SIGKILL,
    every: int = 2,
    at: int = 5,
    steps: int = 30,
) -> None:
    flags = [f"--checkpoint-every={every}", "--model=cnn", *further]
    expected = losses(train(*flags, run="whole", steps=steps))
    killer = kill_at(folder / "run", at, which, number)
    result = through_ray(folder / "run", *flags, steps=steps)
    killer.join(timeout=10)
    assert not killer.is_alive()
    assert losses_in(folder / "run") == expected
    assert of_kind([(r["kind"], r) for r in metrics_of(folder / "run")], "resume"), "it was not restarted"
    assert result.metrics["step"] == steps
    assert result.metrics["loss"] == mean_of(expected)  # of the steps before the kill too


def mean_of(losses: list[float]) -> float:
    """As `Reporter` makes it, whose sum is of Python's floats."""
    return sum(losses) / len(losses)


@pytest.mark.ray
def test_a_run_that_stops_by_intention_is_not_started_again(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match=r"^step 3: the gradient norm is nan; .*step-00000002; look at --lr"):
        through_ray(tmp_path / "run", *DIVERGES, "--max-failures=2", steps=9)
    kinds = [record["kind"] for record in metrics_of(tmp_path / "run")]
    assert kinds == ["start", "train", "checkpoint", "train", "checkpoint", "train", "failure"]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--num-workers 64", "--num-workers 64: Ray has 4 CPU, and each worker takes one"),
        ("--num-workers 8:64", "--num-workers 8:64: Ray has 4 CPU, and each worker takes one"),
        ("--num-workers 1:2 --replicas 2", "--replicas 2: doesn't divide the world size 1"),
        ("--num-workers 2:4 --replicas 2", "--replicas 2: doesn't divide the world size 3"),
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


def test_storage_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"--run-dir .*: can't be written \(.*\); choose a folder that can"):
        through_ray(tmp_path / "file" / "run")


def test_a_name_in_use_is_refused(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path / "run")
    with pytest.raises(ConfigError, match="in use by a run that is still going"):
        through_ray(tmp_path / "run")
    lock.release()


@pytest.mark.timeout(120)
def test_an_address_that_does_not_answer_is_refused_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_train, "SECONDS_FOR_STATUS", 3.0)  # in place of 14
    with pytest.raises(ConfigError, match=r"--address 127.0.0.1:1: nothing answers there"):
        ray_train.check_address("127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--address {address}: nothing answers there as Ray does"):
            ray_train.check_address(address)  # Ray itself would try for more than two minutes

        def refused(*_: Any, **__: Any) -> None:
            said = b"Ensure that the token is available; RAY_AUTH_MODE is currently 'disabled'\n"
            raise subprocess.CalledProcessError(1, "ray", stderr=said)

        monkeypatch.setattr(subprocess, "run", refused)
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
        with pytest.raises(ConfigError, match=f"--address {address}: it asks for a token; set RAY_AUTH_MODE=token"):
            ray_train.check_address(address)

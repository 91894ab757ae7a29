"""Through Ray on a cluster of two nodes, and as a program of its own: nodes that go and come, Ctrl-C, refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launchers import ray_train
from tests.doctor.launch import start as doctor_of_torchrun
from tests.harness import losses, python_environment, small
from tests.launchers.through_ray import losses_in, workers_of_ray
from tests.test_resume import metrics_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster", "no_ray_left")]

Train = Callable[..., list[tuple[str, dict[str, Any]]]]


@pytest.fixture
def two_nodes() -> Iterator[Any]:
    """A cluster of two nodes with a CPU each, on this machine; nobody is connected to it."""
    from ray.cluster_utils import Cluster

    ray_train.prepare()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


class Program:
    """`python -m launchers.ray_train`, or another module, as a user starts it."""

    def __init__(self, run: Path, *flags: str, module: str = "launchers.ray_train") -> None:
        self.run, self.log = run, run.with_name("log")
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *small(run, *flags)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=python_environment(),
            )

    def wait_for(self, what: str, happened: Callable[[], Any], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            assert self.process.poll() is None, f"it ended before {what}:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"no {what} in {seconds} s:\n{self.log.read_text()}"
            time.sleep(0.1)

    def at(self, step: int) -> Callable[[], bool]:
        return lambda: len(self.steps()) >= step

    def steps(self) -> list[int]:
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines()[:-1] if file.is_file() else []  # the last may be half-written
        return [record["step"] for record in map(json.loads, lines) if record["kind"] == "train"]

    def world_sizes(self) -> list[int]:
        return [int(size) for size in re.findall(r"strategy: fsdp2 on (\d+) rank", self.log.read_text())]


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def begin(*arguments: Any, **options: Any) -> Program:
        started.append(Program(*arguments, **options))
        return started[-1]

    yield begin
    for program in started:
        if program.process.poll() is None:
            program.process.kill()
            program.process.wait()


@pytest.mark.slow
def test_an_elastic_run_goes_on_with_the_nodes_there_are(
    train: Train, tmp_path: Path, two_nodes: Any, start: Callable[..., Program]
) -> None:
    flags = ["--checkpoint-every=5", "--model-size=seed"]  # the size whose steps take long enough
    elastic = ["--num-workers=1:2", "--resize-every=5", f"--address={two_nodes.address}"]
    program = start(tmp_path / "run", *flags, *elastic, "--max-steps=100000", "--epochs=1000")
    program.wait_for("step 12", program.at(12))
    assert program.world_sizes() == [2]
    two_nodes.remove_node(next(iter(two_nodes.worker_nodes)), allow_graceful=False)
    program.wait_for("a run on one node", lambda: program.world_sizes() == [2, 1])
    lost_at = program.steps()[-1]
    program.wait_for("20 steps on one node", lambda: program.steps() and program.steps()[-1] >= lost_at + 20)
    two_nodes.add_node(num_cpus=1)
    program.wait_for("a run on two nodes", lambda: program.world_sizes() == [2, 1, 2])
    resumed_at = program.steps()[-1]
    program.wait_for("5 steps on two nodes again", lambda: program.steps() and program.steps()[-1] >= resumed_at + 5)
    program.process.send_signal(signal.SIGINT)
    assert program.process.wait(timeout=60) == 130, program.log.read_text()
    records = [record for record in metrics_of(tmp_path / "run") if record["kind"] == "train"]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    epoch = [32] * 44 + [29]  # of 1437 samples, 16 a rank
    assert [record["samples"] for record in records] == [epoch[i % len(epoch)] for i in range(len(records))]
    # The same samples on another number of ranks: rounding alone differs, until training has amplified it.
    expected = losses(train(*flags, run="torchrun", steps=30))
    assert losses_in(tmp_path / "run")[:10] == expected[:10]
    assert losses_in(tmp_path / "run")[:30] == pytest.approx(expected, rel=1e-3)


def test_ctrl_c_leaves_a_resumable_run_and_no_process(
    train: Train, tmp_path: Path, start: Callable[..., Program]
) -> None:
    flags = ["--checkpoint-every=2", "--max-steps=40"]
    program = start(tmp_path / "run", *flags, "--max-steps=100000")
    program.wait_for("step 5", program.at(5))
    mine = set(workers_of_ray())
    program.process.send_signal(signal.SIGINT)
    assert program.process.wait(timeout=60) == 130, program.log.read_text()
    assert "fsdp2: interrupted; the same --run-dir" in program.log.read_text()
    assert "KeyboardInterrupt" not in program.log.read_text()
    for process in mine:
        assert not os.path.exists(f"/proc/{process}")
    last = program.steps()[-1]
    train(*flags, run="run", steps=last + 3)
    expected = losses(train(*flags, run="whole", steps=last + 3))
    assert losses_in(tmp_path / "run") == expected


@pytest.mark.slow
def test_an_interrupted_search_goes_on(tmp_path: Path, start: Callable[..., Program]) -> None:
    flags = ["--search=lr=grid(2e-3, 1e-3)", "--trials=1", "--epochs=6", "--no-stop-early"]
    program = start(tmp_path / "search", *flags, module="launchers.ray_tune")
    program.wait_for("a result", lambda: "  epoch 2  step " in program.log.read_text())
    program.process.send_signal(signal.SIGINT)
    assert program.process.wait(timeout=90) == 130, program.log.read_text()
    assert "best: " not in program.log.read_text()
    first = {path: len(losses_in(path)) for path in (tmp_path / "search").glob("run-*")}
    assert all(steps < 6 * 45 for steps in first.values())

    program = start(tmp_path / "search", *flags, module="launchers.ray_tune")
    assert program.process.wait(timeout=280) == 0, program.log.read_text()
    printed = program.log.read_text()
    assert "going on with the search" in printed
    assert "best: " in printed
    runs = list((tmp_path / "search").glob("run-*"))
    assert set(first) <= set(runs), "an interrupted trial was begun anew, in another folder"
    assert [len(losses_in(run)) for run in runs] == [6 * 45] * 2


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--num-workers=64"], "fsdp2: error: --num-workers 64: Ray has "),
        (["--address=127.0.0.1:1"], "fsdp2: error: --address 127.0.0.1:1: nothing answers there"),
    ],
)
def test_a_refusal_is_one_line_and_status_2(tmp_path: Path, flags: list[str], part: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "launchers.ray_train", *small(tmp_path / "run", *flags)],
        capture_output=True,
        text=True,
        env=python_environment(),
        timeout=120,
    )
    assert result.returncode == 2
    assert result.stderr.startswith(part)
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_doctor_reports_on_ray_s_workers_as_under_torchrun(tmp_path: Path) -> None:
    flags = ["--quick", "--json", "--threads=1", f"--run-dir={tmp_path / 'run'}"]
    line = [sys.executable, "-m", "launchers.ray_doctor", "--num-workers=2", *flags]
    done = subprocess.run(line, capture_output=True, text=True, env=python_environment(), timeout=400)
    report = json.loads(done.stdout)
    assert (report["ranks"], report["status"]) == (2, done.returncode), done.stderr
    first, *_ = doctor_of_torchrun(flags, ranks=2, cwd=tmp_path)
    there = json.loads(first.communicate(timeout=100)[0])
    assert {row["name"] for row in report["rows"]} == {row["name"] for row in there["rows"]}

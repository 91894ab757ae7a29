"""Two torchruns on one machine as two nodes of an elastic run: one is lost with its rank, and comes back."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Ranks, losses, main_in_ranks, small
from tests.launchers.two_nodes import OWN_MEMORY, Nodes
from tests.test_launch import ROOT, finish

COMMON = ["--global-batch-size=32", "--checkpoint-every=10", "--keep=100000", "--epochs=100000"]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with Nodes(tmp_path) as two:
        yield two


def world_size(run: Path) -> int:
    found: int = json.loads((run / "config.json").read_text())["environment"]["world_size"]
    return found


def until(what: str, nodes: Nodes, condition: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} not within {seconds:.0f} s\n{nodes.output()}"
        time.sleep(0.05)


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    """Of a file that is being written."""
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True) if (run / "metrics.jsonl").exists() else []
    found = [json.loads(line) for line in lines if line.endswith(b"}\n")]
    return [record for record in found if record["kind"] == kind]


def step_of(run: Path) -> int:
    return max((record["step"] for record in records(run, "train")), default=0)


def test_a_lost_node_is_gone_on_without_and_taken_in_when_it_is_back(
    nodes: Nodes, ranks: Ranks, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    flags = small(run, *COMMON)
    nodes.start(0, flags)
    nodes.start(1, flags)
    until("step 15 on two nodes", nodes, lambda: step_of(run) >= 15)
    assert world_size(run) == 2
    nodes.lose(1)
    until("a run on one node", nodes, lambda: len(records(run, "resume")) == 1)
    (alone,) = records(run, "resume")
    assert world_size(run) == 1
    until("20 steps on one node", nodes, lambda: step_of(run) >= alone["step"] + 20)
    nodes.start(1, flags)
    until("a run on two nodes", nodes, lambda: len(records(run, "resume")) == 2)
    together = records(run, "resume")[-1]
    assert world_size(run) == 2
    until("20 steps on two nodes", nodes, lambda: step_of(run) >= together["step"] + 20)
    nodes.stop()

    found = {record["step"]: record["loss"] for record in records(run, "train")}
    assert list(found) == list(range(1, len(found) + 1))
    assert {record["samples"] for record in records(run, "train")} == {32, 1437 % 32}
    # torchrun ends the ranks to take the node in, with a signal after which they save: no step is lost.
    assert f"SIGTERM: saved at step {together['step']} " in nodes.output()
    # Each stretch is that of a run which is resumed by hand from the same checkpoint, on as many ranks.
    for resumed, world in ((alone, 1), (together, 2)):
        steps = range(resumed["step"] + 1, resumed["step"] + 11)
        flags = small(tmp_path / f"by-hand-{world}", *COMMON, f"--resume={resumed['checkpoint']}")
        events = ranks.run(main_in_ranks, [*flags, f"--max-steps={steps[-1]}", "--no-save-model"], ranks=world)[0]
        assert losses(events) == [found[step] for step in steps]


@pytest.mark.slow
def test_a_node_that_is_drained_is_gone_on_without(nodes: Nodes, tmp_path: Path) -> None:
    """With SIGTERM to its torchrun: all save, and no step is lost."""
    run = tmp_path / "run"
    flags = small(run, *COMMON)
    nodes.start(0, flags)
    nodes.start(1, flags)
    until("step 15 on two nodes", nodes, lambda: step_of(run) >= 15)
    drained = nodes.running.pop(1)
    drained.send_signal(signal.SIGTERM)
    until("a run on one node", nodes, lambda: len(records(run, "resume")) == 1)
    (alone,) = records(run, "resume")
    assert world_size(run) == 1
    assert re.search(rf"SIGTERM(, on another node)?: saved at step {alone['step']} ", nodes.output())
    until("20 steps on one node", nodes, lambda: step_of(run) >= alone["step"] + 20)
    nodes.stop()
    finish(drained)


@pytest.mark.slow
def test_the_first_node_is_lost_and_a_store_elsewhere_keeps_the_run(tmp_path: Path) -> None:
    """With the store that docs/elastic.md starts."""
    run = tmp_path / "run"
    with Nodes(tmp_path, server=None) as nodes:
        (command,) = re.findall(r"^python -c '(.*TCPStore.*)'$", (ROOT / "docs" / "elastic.md").read_text(), re.M)
        with subprocess.Popen([sys.executable, "-c", command.replace("29500", str(nodes.port))]) as store:
            try:
                for node in (0, 1):
                    nodes.start(node, small(run, *COMMON))
                until("step 15 on two nodes", nodes, lambda: step_of(run) >= 15)
                nodes.lose(0)
                until("a run on one node", nodes, lambda: len(records(run, "resume")) == 1)
                reached = records(run, "resume")[0]["step"]
                until("10 steps on one node", nodes, lambda: step_of(run) >= reached + 10)
                nodes.start(0, small(run, *COMMON))
                until("a run on two nodes", nodes, lambda: len(records(run, "resume")) == 2)
                assert world_size(run) == 2
                nodes.stop()
            finally:
                store.kill()


def test_a_batch_that_follows_the_number_of_ranks_is_said(ranks: Ranks, tmp_path: Path) -> None:
    flags = small(tmp_path / "run", "--no-save-model")
    ranks.run(main_in_ranks, [*flags, "--max-steps=1"], ranks=2)
    for more, said in (["--global-batch-size=32"], False), ([], True):
        shutil.copytree(tmp_path / "run", tmp_path / "again")
        again = small(tmp_path / "again", "--no-save-model", "--max-steps=2", *more)
        ((_, opening), *_) = ranks.run(main_in_ranks, again, ranks=1)[0]
        shutil.rmtree(tmp_path / "again")
        note = "16 samples a step from here on, and 32 before: --global-batch-size 32 keeps that on any number of ranks"
        assert (note in (opening["note"] or "")) == said


def _can_mount() -> bool:
    return subprocess.run([*OWN_MEMORY, "true"], capture_output=True).returncode == 0


@pytest.mark.slow
def test_another_node_is_filled_from_the_memory_of_the_one_that_is_left(ranks: Ranks, tmp_path: Path) -> None:
    if not _can_mount():
        pytest.skip("needs root, to give each node a /dev/shm of its own")
    run = tmp_path / "run"
    flags = small(run, "--checkpoint-every=100000", "--epochs=100000", "--memory-checkpoint", "--replicas=2")
    with Nodes(tmp_path, nnodes="2", per_node=2, around=OWN_MEMORY) as nodes:
        for node in (0, 1):
            nodes.start(node, flags)
        until("step 8", nodes, lambda: step_of(run) >= 8)
        nodes.lose(1)
        stood = step_of(run)
        nodes.start(1, flags)
        until("a resume", nodes, lambda: len(records(run, "resume")) == 1)
        (resumed,) = records(run, "resume")
        until("10 steps", nodes, lambda: step_of(run) >= resumed["step"] + 10)
        nodes.stop()
    assert stood - 1 <= resumed["step"] <= stood
    assert "1 of 2 nodes got from another" in resumed["note"]
    found = [record["loss"] for record in records(run, "train")]
    whole = small(tmp_path / "whole", "--replicas=2", "--no-save-model", f"--max-steps={resumed['step'] + 10}")
    assert found[: resumed["step"] + 10] == losses(ranks.run(main_in_ranks, whole, ranks=4)[0])

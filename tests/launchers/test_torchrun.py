"""launchers/torchrun.sh on two nodes that have a network each: tests/namespaces.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.harness import Ranks, losses, main_in_ranks, small
from tests.namespaces import Nodes
from tests.test_launch import ROOT, finish, metrics, start

SCRIPT = ROOT / "launchers" / "torchrun.sh"
STATIC = {"HOST": "n0", "NODE_RANK": "{node}"}

# What of the two nodes' network is special -> the hosts that they can resolve, and the script's variables.
NETWORKS: dict[str, tuple[dict[str, str] | None, dict[str, str]]] = {
    "c10d by name": (None, {"HOST": "n0"}),
    "static by name": (None, STATIC),
    "names that don't resolve": ({}, {"HOST": "10.77.0.1", "LOCAL_ADDR": "10.77.0.{number}", "INTERFACE": "cable"}),
    "static, names that don't resolve": ({}, {"HOST": "10.77.0.1", "NODE_RANK": "{node}", "INTERFACE": "cable"}),
    "IPv6": ({"n0": "fd77::1", "n1": "fd77::2"}, {"HOST": "fd77::1"}),
    "IPv6, static": ({"n0": "fd77::1", "n1": "fd77::2"}, {**STATIC, "HOST": "fd77::1"}),
    "several interfaces": (
        {"n0": "192.168.0.1", "n1": "192.168.1.1"},
        {"HOST": "10.77.0.1", "LOCAL_ADDR": "10.77.0.{number}", "INTERFACE": "cable"},
    ),
    "elastic": (None, {"HOST": "n0", "NNODES": "1:2"}),
}


def environment(variables: dict[str, str], node: int) -> dict[str, str]:
    filled = {name: value.format(node=node, number=node + 1) for name, value in variables.items()}
    return {"NNODES": "2", "RANKS_PER_NODE": "1", **filled}


@pytest.mark.parametrize(
    "network", [pytest.param(name, marks=[] if name == "c10d by name" else pytest.mark.slow) for name in NETWORKS]
)
def test_two_nodes_train(tmp_path: Path, network: str) -> None:
    hosts, variables = NETWORKS[network]
    run = tmp_path / "run"
    with Nodes(tmp_path, hosts, second_interface=network == "several interfaces") as nodes:
        for node in (0, 1):
            command: list[str | Path] = [SCRIPT, *small(run, "--max-steps=3", "--no-save-model")]
            nodes.start(node, command, environment(variables, node))
        results = nodes.finish()
    assert [status for status, _, _ in results] == [0, 0], results
    assert json.loads((run / "config.json").read_text())["environment"]["world_size"] == 2
    assert [record["step"] for record in metrics(run, "train")] == [1, 2, 3]
    assert "next: python -m fsdp2.checkpoint export" in "".join(out for _, out, _ in results)


@pytest.mark.slow
def test_nodes_with_different_numbers_of_ranks(tmp_path: Path, ranks: Ranks) -> None:
    flags = ["--max-steps=5", "--global-batch-size=24", "--no-save-model"]
    with Nodes(tmp_path) as nodes:
        for node in (0, 1):
            variables = {**environment({"HOST": "n0"}, node), "RANKS_PER_NODE": str(node + 1)}
            command: list[str | Path] = [SCRIPT, *small(tmp_path / "run", *flags)]
            nodes.start(node, command, variables)
        results = nodes.finish()
    assert [status for status, _, _ in results] == [0, 0], results
    expected = losses(ranks.run(main_in_ranks, small(tmp_path / "one-node", *flags), ranks=3)[0])
    assert [record["loss"] for record in metrics(tmp_path / "run", "train")] == expected


@pytest.mark.slow
def test_a_run_directory_of_each_nodes_own_is_refused(tmp_path: Path) -> None:
    """After the time that a network file system may take to show what another node has written."""
    own = tmp_path / "disk"
    own.mkdir()
    with Nodes(tmp_path, own=own) as nodes:
        for node in (0, 1):
            command: list[str | Path] = [SCRIPT, *small(own / "run", "--max-steps=3")]
            nodes.start(node, command, environment({"HOST": "n0", "NODE_RANK": "{node}"}, node))
        results = nodes.finish(timeout=240)
    assert [status for status, _, _ in results] == [1, 1], results
    line = f"fsdp2: error: --run-dir {own / 'run'}: 1 ranks, on n1, don't see what rank 0 writes there; give a folder "
    assert line in results[0][2]


@pytest.mark.slow
def test_a_time_limit_saves(tmp_path: Path) -> None:
    limit = ["timeout", "-s", "INT", "25"]
    flags = small(tmp_path / "run", "--epochs=100000", "--no-save-model")
    status, out, err = finish(start([*limit, SCRIPT, *flags], tmp_path, NNODES="1", RANKS_PER_NODE="2"))
    assert status == 124, err
    (saved,) = re.findall(r"SIGINT: saved at step (\d+) ", out)
    assert metrics(tmp_path / "run", "checkpoint")[-1]["step"] == int(saved)


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"NNODES": "2"}, "NNODES=2 without HOST: give the name or address of one node"),
        ({"NNODES": "1:4", "HOST": "n0", "NODE_RANK": "0"}, "NNODES=1:4 with NODE_RANK: nodes that come and go"),
        ({"INTERFACE": "eth77"}, "INTERFACE=eth77: this node has "),
    ],
)
def test_what_makes_no_sense_is_one_line(tmp_path: Path, variables: dict[str, str], line: str) -> None:
    status, out, err = finish(start([SCRIPT], tmp_path, **variables))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"torchrun.sh: error: {line}")

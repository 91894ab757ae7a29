"""launchers/skypilot.yaml: what it runs on each node, with the variables that SkyPilot sets there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp2.config import parse
from tests.harness import small
from tests.namespaces import Nodes
from tests.test_launch import ROOT, metrics


def task() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "launchers/skypilot.yaml").read_text())
    return loaded


def test_its_flags_are_those_of_the_training() -> None:
    assert parse(task()["envs"]["FLAGS"].split()).run_dir == "s3://your-bucket/vit-digits"


@pytest.mark.slow
def test_two_nodes_train(tmp_path: Path) -> None:
    run = tmp_path / "run"
    # https://docs.skypilot.co/en/stable/running-jobs/environment-variables.html
    given = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "10.77.0.1\n10.77.0.2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "FLAGS": " ".join(small(run, "--max-steps=3", "--no-save-model")),
    }
    with Nodes(tmp_path) as nodes:
        for node in (0, 1):
            nodes.start(node, ["bash", "-c", f"cd {ROOT}; {task()['run']}"], {**given, "SKYPILOT_NODE_RANK": str(node)})
        results = nodes.finish()
    assert [status for status, _, _ in results] == [0, 0], results
    assert json.loads((run / "config.json").read_text())["environment"]["world_size"] == 2
    assert [record["step"] for record in metrics(run, "train")] == [1, 2, 3]

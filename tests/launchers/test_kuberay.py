"""launchers/kuberay.yaml, as far as it can be checked without a cluster."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from launchers.ray_options import Workers, parse, place

FILE = Path(__file__).parent.parent.parent / "launchers" / "kuberay.yaml"


@pytest.fixture
def objects() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return {document["kind"]: document for document in yaml.safe_load_all(FILE.read_text())}


def test_the_entrypoint_is_a_command_that_fits_the_cluster(objects: dict[str, Any]) -> None:
    spec = objects["RayJob"]["spec"]
    words = shlex.split(spec["entrypoint"])
    assert words[:3] == ["python", "-m", "launchers.ray_train"]
    options, config = parse(words[3:], "launchers.ray_train")
    assert place(options, config)[2].run_dir == "/runs/vit-digits"
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert options.num_workers == Workers(workers["minReplicas"], workers["maxReplicas"])


def test_every_pod_sees_the_storage(objects: dict[str, Any]) -> None:
    claim = objects["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    cluster = objects["RayJob"]["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        for container in pod["containers"]:
            assert {"name": "runs", "mountPath": "/runs"} in container["volumeMounts"]

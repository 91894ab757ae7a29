"""launchers/kubernetes.yaml, as far as it can be checked without a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp2.config import parse

ROOT = Path(__file__).parents[2]
# JobSet's own, v1alpha2, of https://github.com/kubernetes-sigs/jobset, without texts and without the parts of fields
# that the file doesn't use. Unlike the API server it refuses a field that it doesn't know.
SCHEMA = Path(__file__).with_name("jobset.schema.json")


@pytest.fixture
def objects() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return {
        document["kind"]: document for document in yaml.safe_load_all((ROOT / "launchers/kubernetes.yaml").read_text())
    }


def pod_of(objects: dict[str, Any]) -> Any:
    (job,) = objects["JobSet"]["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


def test_it_is_a_jobset(objects: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text())
    jsonschema.validate(objects["JobSet"], schema)
    pod_of(objects)["containers"][0]["volumeMount"] = []
    with pytest.raises(jsonschema.ValidationError, match="volumeMount"):
        jsonschema.validate(objects["JobSet"], schema)


def test_its_command_and_numbers_fit_together(objects: dict[str, Any]) -> None:
    (job,) = objects["JobSet"]["spec"]["replicatedJobs"]
    (container,) = pod_of(objects)["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == int(env["NNODES"])
    # JobSet's names of pods: JOBSET-JOB-INDEX-POD.SUBDOMAIN, which is the name of the JobSet.
    name = objects["JobSet"]["metadata"]["name"]
    assert env["HOST"] == f"{name}-{job['name']}-0-0.{name}"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == env["RANKS_PER_NODE"]
    assert container["command"] == ["launchers/torchrun.sh"]
    script = (ROOT / "launchers/torchrun.sh").read_text()
    assert all(f"${variable}" in script or f"${{{variable}" in script for variable in env)
    assert str(parse(container["args"]).run_dir).startswith("/runs/")


def test_the_pods_see_the_storage(objects: dict[str, Any]) -> None:
    claim = objects["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    volumes = {volume["name"]: volume for volume in pod_of(objects)["volumes"]}
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert {"name": "runs", "mountPath": "/runs"} in pod_of(objects)["containers"][0]["volumeMounts"]

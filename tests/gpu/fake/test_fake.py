"""The GPU's path without a GPU: which device each tensor is on, what the CPU waits for, and the order of streams."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.fake.cases import CASES, MUTANTS

OTHERS = ["transformers' llama", "transformers' gpt2, bf16", "LoRA, bf16", "LoRA, recomputed"]
SAVED = "background save"
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.timeout(900)  # of the first test, which runs all configurations


@pytest.fixture(scope="session")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process has seen that ran all configurations of which tests were selected."""
    if "FSDP2_TEST_DEVICE" in os.environ or torch.cuda.is_available():
        pytest.skip("is for machines without a GPU, in make test")
    if torch.version.cuda is None:
        pytest.skip("this torch is built for CPUs alone, and its tensors can't claim to be on a GPU")
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler: the fake device is a few lines that are loaded before torch")
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    pytest.importorskip("torchao")
    folder = tmp_path_factory.mktemp("fake")
    library, result = folder / "libcuda.so.1", folder / "seen.json"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, Path(__file__).with_name("device.cpp")], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["LD_LIBRARY_PATH"] = os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.fake.program", result, *sorted(_selected(request.session))],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def _selected(session: pytest.Session) -> set[str]:
    parameters = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
    return {SAVED} | {one["name"] for one in parameters if one.get("name") in (*CASES, *OTHERS)}


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_a_step_stays_on_its_device_and_waits_for_nothing(seen: dict[str, Any], name: str) -> None:
    """Forward, backward, optimizer and evaluation of the real loop; a tensor elsewhere is an error of torch's."""
    found = seen["cases"][name]
    assert "error" not in found, found["error"]
    allowed: dict[str, int] = {}
    if name.startswith("fp16"):
        # An update that overflowed is left out, which the scale tells, before the update and after it.
        allowed = {"aten::_local_scalar_dense in parallel/engine.py:step": 2}
    elif name == "nonfinite skip":
        # Whether to update is decided by the CPU.
        allowed = {"aten::_local_scalar_dense in fsdp2/train.py:train_step": 1}
    elif name.startswith("offload"):
        # FSDP2 waits for each gradient's copy, since the optimizer runs on the CPU.
        allowed = {"synchronize": found["parameter_count"]}
    allowed["synchronize"] = allowed.get("synchronize", 0) + 1  # for the loss, which the step after this one reports
    assert found["waits"] == allowed
    assert found["waits_later"] == allowed
    assert found["copies"].keys() == {"non_blocking"}
    assert found["parameters"] == (["cpu"] if name.startswith("offload") else ["cuda"])
    assert found["races"] == []


def test_a_tensor_on_the_other_device_is_seen(seen: dict[str, Any]) -> None:
    """What judges all configurations isn't blind: targets that stayed on the CPU are an error."""
    assert re.search(r"two devices, cuda:0 and cpu|two different devices cuda:0, cpu", seen["mixed"])


def test_a_save_beside_the_training_copies_without_waiting(seen: dict[str, Any]) -> None:
    copies = seen["cases"][SAVED]["staging_copies"]
    assert copies.keys() == {"non_blocking"}
    assert copies["non_blocking"] > 100


@pytest.mark.parametrize(
    ("mutant", "race"),
    [
        ("the copy doesn't wait for the step", r"staging.py:_copy doesn't wait for aten::_fused_adam_"),
        ("the next step doesn't wait for the copy", r"_fused_adam_ in .* doesn't wait for aten::copy_ in .*staging.py"),
        ("the CPU doesn't wait", r"reads what aten::copy_ in checkpoint/staging.py:_copy hasn't brought"),
        ("the CPU doesn't wait", r"metrics.py:flush reads what aten::_to_copy in report/metrics.py:add hasn't"),
        ("no record_stream", r"given back while aten::copy_ in checkpoint/staging.py:_copy may use it"),
    ],
)
def test_each_part_of_the_order_between_streams_is_needed(seen: dict[str, Any], mutant: str, race: str) -> None:
    """A save without one of its waits, or without `record_stream`, is found out; with all of them nothing is."""
    assert seen["mutants"].keys() == MUTANTS.keys()
    assert seen["mutants"]["none"] == []
    found = seen["mutants"][mutant]
    assert isinstance(found, list), found
    assert any(re.search(race, one) for one in found)

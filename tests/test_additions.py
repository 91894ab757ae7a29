"""The additions of docs/contributing.md, made to a copy of the packages as the page says, and run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import python_environment

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/contributing.md").read_text()

MODEL = """
import torch
from torch import nn

from fsdp2.models.cnn import loss
from fsdp2.models.initial import fan_in_uniform, zeros
from fsdp2.models.spec import ModelSpec


class Pixels(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = nn.Linear(784, width), nn.Linear(width, 10)

    def forward(self, x):
        return torch.log_softmax(self.outer(self.inner(x.flatten(1)).relu()), dim=1)


SPEC = ModelSpec("pixels", "image", {"tiny": {"width": 8}}, Pixels, lambda model: [model.inner, model.outer],
                 {"*.weight": fan_in_uniform, "*.bias": zeros}, loss)
"""
DATASET = """
import torch

from fsdp2.data.splits import Dataset, Images


def load():
    pixels = torch.arange(64 * 784, dtype=torch.float32).reshape(64, 28, 28) % 255
    split = Images(pixels, torch.arange(64) % 10, white=255.0, mean=0.5, std=0.3)
    return Dataset(split, split, [str(digit) for digit in range(10)])
"""
STRATEGY = """
from dataclasses import replace

from fsdp2_extra.baselines import none


class Alone(none.NoneEngine):
    strategy = "alone"


def build(options, start):
    engine = none.BASELINE.build(options, start)
    engine.__class__ = Alone
    return engine


BASELINE = replace(none.BASELINE, build=build)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    for package in ("fsdp2", "fsdp2_extra", "fsdp2_tools", "migration", "fsdp1_interface"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def _edit(copy: Path, name: str, old: str, new: str) -> None:
    """An edit of a file whose folder the page names."""
    assert f"`{name.rpartition('/')[0]}/" in PAGE
    text = (copy / name).read_text()
    assert text.count(old) == 1
    (copy / name).write_text(text.replace(old, new))


def _run(copy: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=copy,
        env={**python_environment(), "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_model_a_dataset_and_a_strategy_are_trained(copy: Path) -> None:
    (copy / "fsdp2/models/pixels.py").write_text(MODEL)
    _edit(copy, "fsdp2/models/names.py", 'NAMES = ("vit",', 'NAMES = ("pixels", "vit",')
    (copy / "fsdp2/data/stripes.py").write_text(DATASET)
    _edit(copy, "fsdp2/data/__init__.py", '    "digits": "image",', '    "stripes": "image",\n    "digits": "image",')
    _edit(
        copy,
        "fsdp2/data/__init__.py",
        '    if name == "digits":',
        '    if name == "stripes":\n        from fsdp2.data import stripes\n\n        return stripes.load()\n'
        '    if name == "digits":',
    )
    (copy / "fsdp2_extra/baselines/alone.py").write_text(STRATEGY)
    init = "fsdp2/parallel/baselines.py"
    _edit(copy, init, 'NAMES = ("fsdp1",', 'NAMES = ("alone", "fsdp1",')
    _edit(
        copy,
        init,
        '    if name == "none":',
        '    if name == "alone":\n        from fsdp2_extra.baselines import alone\n\n        return alone.BASELINE\n'
        '    if name == "none":',
    )
    line = [
        "fsdp2.train",
        "--model=pixels",
        "--model-size=tiny",
        "--dataset=stripes",
        "--max-steps=2",
    ]
    losses = []
    for strategy in ("alone", "fsdp2"):
        shown = _run(copy, *line, f"--strategy={strategy}", f"--run-dir={copy / strategy}", "--no-save-model")
        losses.append(re.findall(r"loss ([\d.]+)", shown))
    assert losses[0]
    assert losses[0] == losses[1]


def test_a_row_of_the_doctor_is_shown(copy: Path) -> None:
    machine = "fsdp2_tools/doctor/machine.py"
    _edit(copy, machine, '        "memory": free_memory(),', '        "swap": 3,\n        "memory": free_memory(),')
    _edit(
        copy,
        machine,
        "    return [*result, *memory(first, hosts),",
        '    result.append(Row("swap", str(found[0]["swap"]), "any"))\n    return [*result, *memory(first, hosts),',
    )
    shown = _run(copy, "fsdp2.doctor", "--quick", "--device=cpu")
    assert re.search(r"^.*swap +3 ", shown, re.MULTILINE), shown


def test_a_tool_runs_under_the_books_name(copy: Path) -> None:
    (copy / "fsdp2_tools/hello").mkdir()
    (copy / "fsdp2_tools/hello/__main__.py").write_text('print("hello")\n')
    assert _run(copy, "fsdp2.hello") == "hello\n"


ALONE = """
import runpy, sys
for package in ("fsdp2_extra", "fsdp2_tools", "migration", "fsdp1_interface", "launchers"):
    sys.modules[package] = None  # importing it fails
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def test_the_book_trains_resumes_and_infers_without_another_package(tmp_path: Path) -> None:
    program = tmp_path / "alone.py"
    program.write_text(ALONE)
    flags = ["--model-size=tiny", "--device=cpu", f"--run-dir={tmp_path / 'run'}"]
    commands = ([*flags, "--max-steps=2"], [*flags, "--max-steps=3"])
    for line in (*(["fsdp2.train", *one] for one in commands), ["fsdp2.infer", str(tmp_path / "run")]):
        run = [sys.executable, str(program), *line]
        environment = {**python_environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "test loss" in done.stdout

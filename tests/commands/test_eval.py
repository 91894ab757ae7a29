"""`make eval`: a run is exported and scored by lm-eval, on a task of this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Ranks, main_in_ranks, python_environment, small
from tests.test_chat import PLAIN, make_tokenizer

pytest.importorskip("lm_eval", reason="needs the extra eval")

ROOT = Path(__file__).parents[2]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def _task(folder: Path) -> None:
    folder.mkdir()
    rows = [{"question": "To be, or not", "choices": [" xx", " to be"], "answer": 1}] * 4
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task: dict[str, Any] = {
        "task": "notes",
        "dataset_path": "json",
        "test_split": "test",
        "output_type": "multiple_choice",
    }
    task |= {"dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}}, "metric_list": [{"metric": "acc"}]}
    task |= {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    (folder / "notes.yaml").write_text(json.dumps(task))


def test_a_run_is_scored(ranks: Ranks, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", PLAIN)
    (tmp_path / "notes.txt").write_text("To be, or not to be. " * 400)
    flags = ["--model=llama", "--model-size=debug", f"--dataset=text:{tmp_path}/notes.txt", f"--tokenizer={tokenizer}"]
    flags += ["--seq-len=32", "--max-steps=20", "--lr=0.01"]
    ranks.run(main_in_ranks, [*small(tmp_path / "run"), *flags])
    _task(tmp_path / "task")
    found = f"--include_path {tmp_path}/task --device cpu --output_path {tmp_path}/scores"
    line = ["make", "-n", "-o.venv/.eval", "eval", f"RUN={tmp_path}/run", "TASKS=notes", f"ARGS={found}"]
    printed = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    recipe = printed[printed.index("folder=") :].replace(".venv/bin/python", sys.executable)
    environment = {**os.environ, **python_environment(), **OFFLINE, "TMPDIR": str(tmp_path), "PYTHONPATH": _path()}
    done = subprocess.run(["sh", "-c", recipe], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "scores").rglob("results_*.json")
    scores = json.loads(file.read_bytes())["results"]["notes"]
    assert scores["acc,none"] == 1.0, "the model was trained on the second answer alone"
    assert not list(tmp_path.glob("tmp.*")), "the exported model is removed"


def _path() -> str:
    """This repository before what else the tests import from."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.parametrize(
    ("words", "part"), [(["RUN="], "there is no run yet"), (["RUN=a"], "name what it is scored on")]
)
def test_what_is_missing_is_named(words: list[str], part: str) -> None:
    line = ["make", "-s", "-o.venv/.eval", "eval", *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert re.search(part, done.stdout)

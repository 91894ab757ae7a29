"""metrics.jsonl: valid JSON in full precision, cut back to a checkpoint; steps reported one late."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.metrics import MetricsFile, StepLog


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=_refuse) for line in path.read_text().splitlines()]


def test_floats_keep_every_bit_and_what_is_no_number_is_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl", rank=0)
    loss = 0.1 + 0.2
    file("train", {"step": 1, "loss": loss, "grad_norm": math.nan})
    file("train", {"step": 2, "loss": math.inf})
    file.close()
    assert read(tmp_path / "m.jsonl") == [
        {"kind": "train", "step": 1, "loss": 0.30000000000000004, "grad_norm": None},
        {"kind": "train", "step": 2, "loss": None},
    ]


@pytest.mark.parametrize("torn", ["", '{"kind": "trai'])
def test_cut_keeps_the_lines_up_to_a_checkpoint_and_its_own(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path, rank=0)
    file("train", {"step": 1})
    position = file.position()
    file("checkpoint", {"step": 1})
    file("train", {"step": 2})
    file.close()
    with open(path, "a") as raw:
        raw.write(torn)
    again = MetricsFile(path, rank=0)
    again.cut(position)
    again("train", {"step": 2, "again": True})
    again.close()
    assert [(record["kind"], record["step"]) for record in read(path)] == [
        ("train", 1),
        ("checkpoint", 1),
        ("train", 2),
    ]
    assert read(path)[-1]["again"]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl", rank=1)
    file("train", {"step": 1})
    assert file.position() == 0
    file.cut(0)
    file.close()
    assert not (tmp_path / "m.jsonl").exists()


def test_a_step_is_reported_when_the_next_one_is_there() -> None:
    seen: list[int] = []
    log = StepLog(lambda kind, data: seen.append(data["step"]), torch.device("cpu"))

    def add(step: int, stop: float = 0.0) -> None:
        log.add(
            {"step": step, "epoch": 0, "lr": 0.1, "samples": 4},
            torch.tensor([1.0, 2.0, stop, 0.0], dtype=torch.float64),
        )

    add(1)
    assert seen == []
    add(2, stop=2.0)
    assert seen == [1]
    assert log.stop == 0
    log.flush()
    log.flush()
    assert seen == [1, 2]
    assert log.stop == 2

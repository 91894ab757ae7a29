"""metrics.jsonl: valid JSON in full precision, cut back to a checkpoint; steps reported one late."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.report import records
from fsdp2.report.metrics import MetricsFile, StepLog


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=_refuse) for line in path.read_text().splitlines()]


def test_floats_keep_every_bit_and_what_is_no_number_is_null(tmp_path: Path) -> None:
    file, before = MetricsFile(tmp_path / "m.jsonl", rank=0), round(time.time(), 3)
    loss = 0.1 + 0.2
    file("train", {"step": 1, "loss": loss, "grad_norm": math.nan})
    file("train", {"step": 2, "loss": math.inf})
    file.close()
    records = read(tmp_path / "m.jsonl")
    assert all(before <= record.pop("time") <= time.time() + 0.001 for record in records)  # it is rounded
    assert records == [
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
    assert again.cut(position, 1) is None
    again("train", {"step": 2, "again": True})
    again.close()
    assert [(record["kind"], record["step"]) for record in read(path)] == [
        ("train", 1),
        ("checkpoint", 1),
        ("train", 2),
    ]
    assert read(path)[-1]["again"]


def test_the_last_steps_are_the_newest(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl", rank=0)
    for step in range(1, 6):
        file("train", {"step": step})
        file("checkpoint", {"step": step})
    assert [record["step"] for record in file.last_steps(2)] == [4, 5]
    file.close()


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl", rank=1)
    file("train", {"step": 1})
    assert file.position() == 0
    assert file.cut(0, 0) is None
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


def _written(path: Path) -> tuple[list[bytes], int]:
    """The lines of a run that has saved at steps 2 and 4 and then did two more, and the position of step 4."""
    file = MetricsFile(path, rank=0)
    file("start", {"step": 0})
    for step in range(1, 7):
        file("train", {"step": step, "loss": 1 / step})
        if step in (2, 4):
            position = file.position()
            file("checkpoint", {"step": step})
    file("failure", {"rank": 0, "error": "gone"})
    file.close()
    return path.read_bytes().splitlines(keepends=True), position


def _damage(lines: list[bytes], position: int, how: str) -> bytes:
    whole = b"".join(lines)
    return {
        "shortened in a line": whole[: len(b"".join(lines[:4])) + 9],
        "shortened at a line": b"".join(lines[:4]),
        "gone": b"",
        "a hole": b"".join(lines[:4]) + bytes(records.LONGEST_LINE) + b"".join(lines[4:]),
        "its end is zeros": b"".join(lines[:4]) + bytes(position - len(b"".join(lines[:4]))),
        "a line is zeros": b"".join([*lines[:4], bytes(len(lines[4]) - 1) + b"\n", *lines[5:]]),
        "a line is no JSON": b"".join([*lines[:4], b"[" * 100_000 + b"\n\xff\n{}\n", *lines[5:]]),
        "a line stands twice": b"".join([*lines[:5], lines[4], *lines[5:]]),
        "a byte early on": whole[: len(lines[0])] + b"x" + whole[len(lines[0]) + 1 :],
        "a step is none": whole.replace(b'"step": 1,', b'"stop": 1,', 1),
        "another order": b"".join([lines[0], lines[2], lines[1], *lines[3:]]),
    }[how]


@pytest.mark.parametrize(
    ("how", "missing", "steps"),
    [
        ("shortened in a line", "steps 3–4 are missing from it", [1, 2]),
        ("shortened at a line", "steps 3–4 are missing from it", [1, 2]),
        ("gone", "steps 1–4 are missing from it", []),
        ("a hole", "steps 3–4 are missing from it", [1, 2]),
        ("its end is zeros", "steps 3–4 are missing from it", [1, 2]),
        ("a line is zeros", "step 3 is missing from it", [1, 2, 4]),
        ("a line is no JSON", "step 3 is missing from it", [1, 2, 4]),
        ("a line stands twice", "no step is missing from it", [1, 2, 3, 4]),
        ("a byte early on", "step 1 is missing from it", [2, 3, 4]),
        ("a step is none", "step 1 is missing from it", [2, 3, 4]),
        ("another order", "no step is missing from it", [1, 2, 3, 4]),
    ],
)
def test_a_damaged_file_keeps_what_can_be_read_and_says_what_is_missing(
    tmp_path: Path, how: str, missing: str, steps: list[int]
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines, position = _written(path)
    path.write_bytes(_damage(lines, position, how))
    again = MetricsFile(path, rank=0)
    assert again.cut(position, 4) == f"metrics.jsonl was damaged and is repaired: {missing}"
    again("train", {"step": 5})
    again.close()
    assert [record["step"] for record in read(path) if record["kind"] == "train"] == [*steps, 5]
    assert all(line in lines for line in path.read_bytes().splitlines(keepends=True)[:-1])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_stands_behind_a_step_is_no_part_of_a_repaired_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines, position = _written(path)
    later = b'{"kind": "resume", "step": 4}\n{"kind": "train", "step": 5}\n{"kind": "end", "step": 5}\n'
    path.write_bytes(b"".join([*lines[:4], *lines[5:7], lines[7], later]))
    again = MetricsFile(path, rank=0)
    assert again.cut(position, 4) is not None
    again.close()
    assert [(record["kind"], record["step"]) for record in read(path)] == [
        ("start", 0), ("train", 1), ("train", 2), ("checkpoint", 2), ("train", 4), ("checkpoint", 4),
    ]  # fmt: skip


def test_a_file_that_was_begun_at_a_later_step_misses_nothing_before_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "resume", "step": 7}\n{"kind": "train", "step": 8}\n\0\0\0')
    again = MetricsFile(path, rank=0)
    assert again.cut(999, 11) == "metrics.jsonl was damaged and is repaired: steps 9–11 are missing from it"
    again.close()


@pytest.mark.parametrize("torn", [b'{"kind": "tra', bytes(7), b"[]\n"])
def test_readers_name_a_line_that_is_none(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    lines, _ = _written(path)
    assert [json.dumps(record).encode() + b"\n" for record in records.read(path)] == lines
    path.write_bytes(b"".join(lines[:2]) + torn)
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 3 is not a complete record"):
        records.read(path)


def test_a_resume_repairs_the_file_and_says_so(train: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    train("--checkpoint-every=2", steps=4)
    before = read(path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]) + b'{"kind": "trai')
    (resumed,) = [data for kind, data in train("--checkpoint-every=2", steps=6) if kind == "resume"]
    assert resumed["note"] == "metrics.jsonl was damaged and is repaired: steps 3–4 are missing from it"
    assert read(path)[:3] == before[:3]
    assert [record["step"] for record in read(path) if record["kind"] == "train"] == [1, 2, 5, 6]

"""A run says what the plan in its directory said, and what was measured; a run out of memory says how to plan."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.config import parse
from fsdp2.report import PLAN, planned
from fsdp2.units import size
from fsdp2_tools.plan.__main__ import main as plan
from tests.harness import main_in_ranks, small

# One for all, so that they are planned once.
FLAGS = ["--max-steps=4", "--test-batch-size=16", "--no-save-model"]


def _printed(flags: list[str]) -> tuple[list[str], list[str], list[str]]:
    """A run's header, what it prints, and the notes of its end if it is out of memory. In `Ranks`."""
    out = io.StringIO()
    events: list[Any] = []
    with contextlib.redirect_stdout(out):
        try:
            events = main_in_ranks(flags)
        except torch.OutOfMemoryError as error:
            return [], out.getvalue().splitlines(), error.__notes__
    header = next(data["header"] for kind, data in events if kind in ("start", "resume"))
    return header, out.getvalue().splitlines(), []


def test_a_run_says_what_the_plan_said(ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = small(tmp_path / "run", *FLAGS)
    plan([*flags, "--ranks=2"])
    capsys.readouterr()
    (header, printed, _), _ = ranks.run(_printed, [*flags, "--memory-limit=1GB"])
    (line,) = [line for line in header if line.startswith("plan: ")]
    content = json.loads((tmp_path / "run" / PLAN).read_text())
    there = planned.read(parse(flags), 2)
    assert isinstance(there, planned.Planned)
    assert there.tensors == content["plans"][0]["tensors"]
    assert line == there.line
    (end,) = [line for line in printed if line.startswith("planned ")]
    assert " measured (" in end
    assert abs(float(end.rpartition("(")[2].rstrip("%)"))) < 6
    # Without a ledger nobody counts a CPU's tensors, and the run says so.
    (_, printed, _), _ = ranks.run(_printed, [*flags, "--max-steps=5"])
    assert any(
        line.endswith("not counted here (on a CPU --memory-snapshot or --memory-limit does)") for line in printed
    )


def test_other_flags_and_other_ranks_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = small(tmp_path, *FLAGS)
    plan([*flags, "--ranks=2"])
    there = planned.read(parse([*flags, "--batch-size=4", "--lr=0.1", "--doctor", "--shard-granularity=root"]), 2)
    assert isinstance(there, planned.Planned)
    assert there.other == ("--batch-size", "--shard-granularity")
    assert "is for 2 ranks; python -m fsdp2.plan --ranks 3" in str(planned.read(parse(flags), 3))
    assert planned.read(parse(small(tmp_path / "none")), 2) is None
    for content in (b"[", b"{}", b'{"plans": [3]}', b"\xff", b'{"plans": [{"ranks": 2}], "flags": 3}'):
        (tmp_path / PLAN).write_bytes(content)
        assert "can't be read as one" in str(planned.read(parse(flags), 2))


def test_what_was_measured_stands_beside_a_plan_with_a_time() -> None:
    there = planned.Planned(1000, (90.0, 100.0, 120.0), "backward", ())
    assert there.line == "plan: 1.0 kB of tensors a rank, in backward, a step in 100.0 ms (90.0 to 120.0)"
    assert there.beside(990, [1.0, 110.0, 130.0]) == [
        "planned 1.0 kB of tensors; 990 B measured (-1.0%)",
        "planned a step in 100.0 ms (90.0 to 120.0); 110.0 ms measured (+10.0%)",
    ]


def test_out_of_memory_offers_the_plan_that_finds_flags(
    ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = small(tmp_path / "run", *FLAGS, "--memory-limit=1MB")
    for _, _, notes in ranks.run(_printed, flags):
        (command,) = [line for line in notes[-1].splitlines() if "python -m fsdp2.plan" in line]
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "fsdp2.plan"]
    (base,) = plan(words[3:])
    assert base.budget == 1_000_000
    assert not base.fits
    assert "alone, each flag would save" in capsys.readouterr().out


def test_out_of_memory_says_what_the_plan_has_planned(
    ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = small(tmp_path / "run", *FLAGS, "--memory-limit=1MB")
    plan([*flags, "--ranks=2"])
    found = json.loads((tmp_path / "run" / PLAN).read_text())["advice"]
    flag, saved = next(iter(found["singly"].items()))
    for _, _, notes in ranks.run(_printed, flags):
        assert f"  {flag:44}{size(saved)} less" in notes[-2].splitlines()
        assert "python -m fsdp2.plan" in notes[-1]
    assert planned.advice(str(tmp_path / "run"), 3) is None
    assert planned.advice(str(tmp_path), 2) is None

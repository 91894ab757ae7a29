"""`make parity`: what it says of two runs, and what it refuses. The runs themselves are in test_ray_train.py."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from fsdp2.options.errors import ConfigError
from launchers.parity import compare, main, train

LOSSES = {1: 2.3, 2: 2.25, 3: 2.125}


def test_equal_losses_are_said_to_be_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(LOSSES, dict(LOSSES), "there") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("equal: 3 of 3 losses, bit for bit")


def test_losses_that_are_no_numbers_on_both_sides_are_alike() -> None:
    assert compare({1: 2.0, 2: math.nan}, {1: 2.0, 2: math.nan}, "there") == 0
    assert compare({1: 2.0, 2: 2.0}, {1: 2.0, 2: math.nan}, "there") == 1


@pytest.mark.parametrize("other", [{**LOSSES, 2: 2.2500000000000004}, {1: 2.3}])
def test_the_first_step_that_differs_is_named(other: dict[int, float], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(LOSSES, other, "there") == 1
    said = capsys.readouterr().out
    assert "they differ first at step 2" in said
    assert said.count("differs") == len([step for step in LOSSES if other.get(step) != LOSSES[step]])


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--num-workers 1:2", "torchrun is not elastic"),
        ("--name x", "there are two runs"),
        ("--resume 5", "starts from nothing"),
        ("--run-dir .", "exists; each comparison starts from nothing"),
    ],
)
def test_what_can_not_be_compared_is_refused(flags: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        main(flags.split())


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    program = "import sys; print('fsdp2: error: --lr 0: no', file=sys.stderr); sys.exit(2)"
    with pytest.raises(ConfigError, match="--lr 0: no"):
        train([sys.executable, "-c", program], tmp_path)

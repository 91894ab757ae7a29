"""The verdict on two records that are written down here: what is equal, to rounding, different, and from where on."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from migration.prove.cli import text
from migration.prove.compare import DIFFERENT, EQUAL, ROUNDING, apart, compare
from migration.prove.parts import Part, described
from migration.prove.record import Record

WEIGHT = torch.arange(1.0, 9.0)


def state(step: int, when: str, values: torch.Tensor, name: str = "weight") -> dict[str, Any]:
    part = Part(name, 0, values, torch.arange(len(values)), None)
    return {"kind": "state", "step": step, "when": when, "parts": {name: described(part, values, {})}, "buffers": {}}


def run(losses: list[float], *, norms: list[float] | None = None, name: str = "weight", **settings: Any) -> Record:
    """One rank with one parameter, whose gradient is as large as the loss says."""
    facts: dict[str, Any] = {
        "rank": 0,
        "world": 1,
        "low": False,
        "low_buffers": [],
        "shared": None,
        "keeps_gathered": False,
        "apart": False,
        "fast": False,
        "unset": [],
    }
    events = [{"kind": "facts", "step": 1, **facts}, state(1, "before", WEIGHT, name)]
    for step, loss in enumerate(losses, 1):
        events.append({"kind": "backward", "step": step, "value": loss, "low": False})
        events.append(state(step, "unclipped", WEIGHT, name))
        if norms:
            events.append({"kind": "clip", "step": step, "norm": norms[step - 1], "low": False})
        events.append(state(step, "gradient", WEIGHT, name))
        events.append({"kind": "settings", "step": step, "groups": [{"lr": 0.1, **settings}], "of": {name: 0}})
        events.append(state(step, "after", WEIGHT * (1 + loss), name))
    return Record([events])


@pytest.mark.parametrize(
    ("before", "after", "verdict", "first", "status"),
    [
        (run([1.0, 0.5]), run([1.0, 0.5]), EQUAL, None, 0),
        (run([math.nan]), run([math.nan]), EQUAL, None, 0),
        (run([1.0, 0.5]), run([1.0, 0.5 + 1e-7]), ROUNDING, "step 2: loss on rank 0", 1),
        (run([1.0, 0.5]), run([1.0, 0.6]), DIFFERENT, "step 2: loss on rank 0", 1),
        (run([1.0, 0.5]), run([1.0 + 1e-7, 0.6]), DIFFERENT, "step 1: loss on rank 0", 1),
        (run([1.0]), run([math.nan]), DIFFERENT, "step 1: loss on rank 0", 1),
        (run([1.0], norms=[2.0]), run([1.0], norms=[2.0 + 1e-7]), ROUNDING, "step 1: norm", 0),
        (run([1.0], norms=[2.0]), run([1.0], norms=[1.0]), DIFFERENT, "step 1: norm", 1),
        (run([1.0], norms=[2.0]), run([1.0]), DIFFERENT, "step 1: norm", 1),
        # Gradients that add up: the losses of few steps are as close as roundings, the norms aren't.
        (run([1.0] * 2, norms=[2.0] * 2), run([1.0] * 2, norms=[2.0 + 1e-7, 3.8]), DIFFERENT, "step 1: norm", 1),
        (run([1.0]), run([1.0, 0.5]), DIFFERENT, "step 2: steps", 1),
        (run([1.0]), run([1.0], lr=0.2), DIFFERENT, "step 1: settings lr of group 0", 1),
        (run([1.0], fused=True), run([1.0], fused=None), EQUAL, None, 0),
        (run([1.0]), run([1.0], name="other"), DIFFERENT, "step 1: initial parameter other", 1),
        (run([1.0]), Record(run([1.0]).ranks * 2), DIFFERENT, "step 1: ranks", 1),
    ],
)
def test_the_first_difference_decides(
    before: Record, after: Record, verdict: str, first: str | None, status: int
) -> None:
    found = compare(before, after)
    assert (found.verdict, found.status) == (verdict, status)
    assert (found.first.line() if found.first else "").startswith(first or "")
    assert (found.first is None) == (first is None)
    assert text(found).endswith(f"verdict: {verdict}")
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["status"] == status


def test_numbers_are_apart_in_units_of_the_larger() -> None:
    assert apart(1.0, 2.0) == 0.5
    assert apart(-1.0, 1.0) == 2.0
    assert apart(0.0, 0.0) == apart(None, None) == 0.0
    assert apart(1.0, None) == apart(math.inf, 1.0) == math.inf

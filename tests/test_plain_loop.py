"""`examples/plain_loop.py` beside the same loop without ranks, and killed half-way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from examples import plain_loop
from fsdp2.models import initial
from tests.harness import Ranks
from tests.programs import on_ranks_of_its_own

CPU = torch.device("cpu")


def _alone(steps: int) -> list[float]:
    model = plain_loop.Model()
    initial.reset_parameters(model, plain_loop.INITIAL, seed=1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(steps):
        order = torch.randperm(len(plain_loop.TEXT), generator=torch.Generator().manual_seed(step))
        rows = plain_loop.TEXT[order[: plain_loop.ROWS]]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _trained(out: Path, steps: int = 6, replicas: int = 1, compute: str | None = None) -> list[float]:
    return plain_loop.train(out, CPU, steps, replicas=replicas, compute=compute)


def test_its_losses_are_those_without_ranks(ranks: Ranks, tmp_path: Path) -> None:
    expected = pytest.approx(_alone(6), rel=1e-5)  # ranks add up in another order
    whole = ranks.run(_trained, tmp_path / "whole")
    assert whole == [expected] * 2
    assert ranks.run(_trained, tmp_path / "hsdp", 6, 2) == [expected] * 2
    half = ranks.run(_trained, tmp_path / "half", 6, 1, "bf16")
    assert half[0] == pytest.approx(_alone(6), rel=1e-2)
    assert half[0] != whole[0]
    first, rest = ranks.run(_trained, tmp_path / "out", 3), ranks.run(_trained, tmp_path / "out")
    assert [one + more for one, more in zip(first, rest, strict=True)] == whole


def test_it_runs_as_a_program(tmp_path: Path) -> None:
    status, printed = on_ranks_of_its_own(2, plain_loop.__file__, [str(tmp_path)], tmp_path, {})
    assert status == 0, printed
    assert (tmp_path / "checkpoints" / "step-00000006" / "COMMIT.json").exists()

"""`examples/plain_loop.py` beside the same loop without ranks, and killed half-way."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from examples import plain_loop
from fsdp2.checkpoint import files, saver, state, store
from fsdp2.models import initial
from fsdp2.models.meta import parameters_on_meta
from fsdp2.parallel.shards import local
from tests.harness import Ranks
from tests.programs import on_ranks_of_its_own

CPU = torch.device("cpu")


def _alone(steps: int) -> list[float]:
    model = plain_loop.Model()
    initial.reset_parameters(model, plain_loop.INITIAL, seed=1, buffers=False)
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


class WithBuffers(plain_loop.Model):
    """As many are written: a mask by the name of a bias, a table without a place in the state dict, a norm `ln`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tensor(0.5))
        self.register_buffer("mask", torch.ones(plain_loop.LENGTH, 1).tril(), persistent=False)
        self.ln = torch.nn.LayerNorm(256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.ln(super().forward(tokens)) * self.bias + self.mask


def _with_buffers(out: Path) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_loop, "Model", WithBuffers)
        return _trained(out)


def test_buffers_are_those_of_the_models_code(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_loop, "Model", WithBuffers)
    assert ranks.run(_with_buffers, tmp_path) == [pytest.approx(_alone(6), rel=1e-5)] * 2


def _saved_as_nan(out: Path) -> str:
    model = plain_loop.build(CPU)
    place = store.Store(files.LocalFiles(out))
    app = state.AppState(model, torch.optim.SGD(model.parameters(), lr=1.0), {})
    saver.save_now(place, app, 1, keep=1)
    if dist.get_rank() == 1:
        with torch.no_grad():
            local(model.head.weight).fill_(math.nan)
    with pytest.raises(saver.SaveFailed) as caught:
        saver.save_now(place, app, 2, keep=1)
    return str(caught.value)


def test_weights_that_are_no_numbers_take_no_checkpoints_place(ranks: Ranks, tmp_path: Path) -> None:
    assert set(ranks.run(_saved_as_nan, tmp_path)) == {
        f"step 2 wasn't saved to {tmp_path}: its weights hold NaN or infinity"
    }
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000001"]


# Of a page's line, what shows more of it: AdamW's steps and bf16's rounding hide what others do, and norms are below 1.
CLIPPED = {"parameters(), 1.0": "parameters(), 0.1", "keep=2": "keep=9"}
PLAINER = {**CLIPPED, '"bf16", "fp32"': 'None, "fp32"', "AdamW": "SGD", "lr=1e-3": "lr=2.0"}


def _of_the_page(out: Path, plainer: dict[str, str]) -> list[float]:
    page = (Path(plain_loop.__file__).parents[1] / "docs" / "own-models.md").read_text()
    (block,) = re.findall(r"```python\n(import torch\n.*?)```", page, re.DOTALL)
    for given, instead in plainer.items():
        assert block.count(given) == 1
        block = block.replace(given, instead)
    names: dict[str, Any] = {}
    exec(block, names)
    with parameters_on_meta():
        model = plain_loop.Model()
    loop: Callable[..., list[float]] = names["loop"]
    return loop(model, list(model.blocks), plain_loop.INITIAL, _parts(dist.get_rank()), out, 4)


def _parts(rank: int) -> list[tuple[Tensor, Tensor]]:
    rows = plain_loop.TEXT[rank * 8 : rank * 8 + 8]
    return [(part[:, :-1], part[:, 1:]) for part in rows.chunk(2)]


@pytest.mark.parametrize(
    ("plainer", "rel"), [(CLIPPED, 1e-2), (PLAINER, 1e-5)]
)  # bf16 beside fp32; ranks add in another order
def test_the_loop_of_the_page_is_a_loop_without_ranks(
    ranks: Ranks, tmp_path: Path, plainer: dict[str, str], rel: float
) -> None:
    model = plain_loop.Model()
    initial.reset_parameters(model, plain_loop.INITIAL, seed=1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=2.0)
    if plainer is CLIPPED:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule, expected = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4), list[list[float]]()
    for _ in range(4):
        for rank in (0, 1):
            of_rank = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2 for x, y in _parts(rank)]
            (sum(of_rank) / 2).backward()  # type: ignore[union-attr]
            expected.append([one.item() for one in of_rank])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    made = ranks.run(_of_the_page, tmp_path, plainer)
    for rank, losses in enumerate(made):
        assert losses == pytest.approx([loss for step in expected[rank::2] for loss in step], rel=rel)
    for step in (2, 3, 4):
        shutil.rmtree(tmp_path / f"step-0000000{step}")
    assert ranks.run(_of_the_page, tmp_path, plainer) == [losses[-6:] for losses in made]


def test_it_runs_as_a_program(tmp_path: Path) -> None:
    status, printed = on_ranks_of_its_own(2, plain_loop.__file__, [str(tmp_path)], tmp_path, {})
    assert status == 0, printed
    assert (tmp_path / "checkpoints" / "step-00000006" / "COMMIT.json").exists()

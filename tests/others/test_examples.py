"""The loops of `examples/` on two ranks are the same loops in one process."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from examples import dpo, own_loop
from tests.harness import Ranks, same
from tests.others.common import plain, save
from tests.programs import on_ranks_of_its_own

CPU = torch.device("cpu")


def test_it_fits_on_a_screen() -> None:
    assert len(Path(own_loop.__file__).read_text().splitlines()) <= 60


def _norm_on_two_ranks(gradients: list[Tensor]) -> Tensor:
    """As two ranks add it up that hold half of each gradient: the last bits aren't those of a sum over whole ones."""
    halves = [[gradient.chunk(2)[rank] for gradient in gradients] for rank in (0, 1)]
    squares = [torch.nn.utils.get_total_norm(half, foreach=True).square() for half in halves]
    return torch.stack(squares).sum().sqrt()


def _plain_loop(folder: str, steps: int, norm: float) -> tuple[list[float], list[float], nn.Module]:
    """Losses, norms and the model of own_loop.py's loop in one process, with what each of two ranks gets in turn."""
    model = plain(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(steps):
        order = torch.randperm(len(own_loop.TEXT), generator=torch.Generator().manual_seed(step))[: own_loop.ROWS]
        parts = [model(input_ids=own_loop.TEXT[mine], labels=own_loop.TEXT[mine]).loss / 2 for mine in order.chunk(2)]
        for part in parts:
            part.backward()
        losses.append((parts[0] + parts[1]).item())  # in fp32, as the ranks add them
        norms.append(float(_norm_on_two_ranks([p.grad for p in model.parameters() if p.grad is not None])))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), norm, torch.tensor(norms[-1]), foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model


def test_own_loop(ranks: Ranks, tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "model").removeprefix("hf:")
    expected, norms, trained = _plain_loop(folder, 6, 1.0)
    assert max(norms) > 1.0, "nothing is clipped: the test shows less than it says"
    first = ranks.run(own_loop.train, tmp_path / "out", folder, CPU, 3)
    rest = ranks.run(own_loop.train, tmp_path / "out", folder, CPU)
    assert [one + more for one, more in zip(first, rest, strict=True)] == [expected] * 2
    exported = plain(str(tmp_path / "out" / "model-6"))
    tokens = own_loop.TEXT[:2]
    assert torch.equal(exported(input_ids=tokens).logits, trained.eval()(input_ids=tokens).logits)


def _dpo_on_two_ranks(folder: str) -> dict[str, Any]:
    """The example's losses, and of one step by hand its gradients and what has become of the reference."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(dist, "init_process_group", lambda: None)  # there is one
        patch.setattr(dist, "destroy_process_group", lambda: None)
        patch.setattr(sys, "argv", ["dpo.py", folder])
        runpy.run_path(dpo.__file__, run_name="__main__")
    policy, reference = (dpo.sharded(folder, CPU, trained=trained) for trained in (True, False))
    chosen, rejected = ([part.chunk(2)[dist.get_rank()] for part in dpo.rows(answer)] for answer in (1, 2))
    (dpo.loss_of(policy, reference, chosen, rejected) / len(dpo.PAIRS) * 2).backward()
    return {
        "losses": json.loads(printed.getvalue()),
        "gradients": {name: one.grad.full_tensor() for name, one in policy.named_parameters()},
        "reference is sharded": all(isinstance(one, DTensor) for one in reference.parameters()),
        "reference": {name: one.full_tensor() for name, one in reference.named_parameters()},
        "its gradients": [name for name, one in reference.named_parameters() if one.grad is not None],
    }


def _dpo_alone(folder: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and the first step's gradients in one process, with what each of two ranks gets in turn."""
    policy, reference = plain(folder), plain(folder)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    losses, first = [], {}
    for step in range(steps):
        parts = []
        for rank in (0, 1):
            chosen, rejected = ([part.chunk(2)[rank] for part in dpo.rows(answer)] for answer in (1, 2))
            parts.append(dpo.loss_of(policy, reference, chosen, rejected) / len(dpo.PAIRS))
            parts[-1].backward()
        losses.append((parts[0] + parts[1]).item())
        if step == 0:
            first = {name: one.grad.clone() for name, one in policy.named_parameters() if one.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, first


def test_dpo(ranks: Ranks, tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "model").removeprefix("hf:")
    losses, gradients = _dpo_alone(folder, 5)
    untouched = dict(plain(folder).named_parameters())
    assert losses[-1] < losses[0]
    for found in ranks.run(_dpo_on_two_ranks, folder):
        assert found["losses"] == losses
        assert same(found["gradients"], gradients)
        assert found["reference is sharded"]
        assert same(found["reference"], untouched)
        assert found["its gradients"] == []


def test_own_loop_runs_as_a_program(tmp_path: Path) -> None:
    status, printed = on_ranks_of_its_own(2, own_loop.__file__, [str(tmp_path)], tmp_path, {})
    assert status == 0, printed
    first, second = (json.loads(line) for line in re.findall(r"\[\d[\d., ]+\]", printed))
    assert first == second
    assert first[-1] < first[0]
    assert (tmp_path / "model-6" / "config.json").is_file()

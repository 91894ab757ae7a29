"""The loops of `examples/` on two ranks are the same loops in one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from examples import own_loop
from tests.harness import Ranks
from tests.others.common import plain, save

CPU = torch.device("cpu")


def test_it_fits_on_a_screen() -> None:
    assert len(Path(own_loop.__file__).read_text().splitlines()) <= 60


def _norm_on_two_ranks(gradients: list[Tensor]) -> Tensor:
    """As two ranks that hold half of each gradient add it up: by its last bits another sum than of whole gradients."""
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
        losses.append(float(sum(parts)))
        norms.append(float(_norm_on_two_ranks([p.grad for p in model.parameters() if p.grad is not None])))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), norm, torch.tensor(norms[-1]), foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model


def test_own_loop(ranks: Ranks, tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "model").removeprefix("hf:")
    expected, norms, trained = _plain_loop(folder, 6, 1.0)
    assert min(norms) < 1.0 < max(norms) or min(norms) > 1.0
    first = ranks.run(own_loop.train, tmp_path / "out", folder, CPU, 3)
    rest = ranks.run(own_loop.train, tmp_path / "out", folder, CPU)
    assert [one + more for one, more in zip(first, rest, strict=True)] == [expected] * 2
    exported = plain(str(tmp_path / "out" / "model-6"))
    tokens = own_loop.TEXT[:2]
    assert torch.equal(exported(input_ids=tokens).logits, trained.eval()(input_ids=tokens).logits)

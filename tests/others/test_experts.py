"""Experts that no token of one rank, or of all, chooses: no rank waits, and gradients are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2 import train
from fsdp2.config import parse
from fsdp2.data.loader import Batch
from fsdp2.run.process import runtime
from tests.harness import Ranks, same

# The numbers, modulo 3, of the tokens that each of two ranks gets in each step: the experts that are called.
CALLED = [((0, 1), (0, 1, 2)), ((0, 2), (1,)), ((1,), (2,)), ((0, 1, 2), (0, 1, 2))]


def _tokens(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    classes = torch.tensor(CALLED[step][rank])
    chosen = classes[torch.randint(len(classes), (4, 8), generator=generator)]
    return chosen + 3 * torch.randint(10, (4, 8), generator=generator)


def _trained(flags: str) -> dict[str, Any]:
    """Losses of this process, and the whole gradients of each step: two ranks' batches, or both in one process."""
    config = parse(
        ["--model=tests.others.own:sparse", "--dataset=random-tokens", "--device=cpu", "--lr=0.01", *flags.split()]
    )
    spec, world = config.spec, runtime.world()
    engine = train.make_engine(config, world, torch.device("cpu"), restoring=False)
    losses, gradients = [], []
    for step in range(len(CALLED)):
        engine.begin_step()
        for rank in [dist.get_rank()] if world.world_size > 1 else (0, 1):
            tokens = _tokens(step, rank)
            batch = Batch(tokens, tokens.roll(1, 1), True, 8, 64, world.world_size > 1 or rank == 1)
            loss = spec.loss(engine.forward(batch), batch.targets)
            engine.backward(loss * world.world_size / 64, last_microbatch=batch.last)
            losses.append(loss.item())
        engine.clip(None)
        found = {name: one.grad for name, one in engine.model.named_parameters() if one.grad is not None}
        gradients.append({n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in found.items()})
        engine.step()
    return {"losses": losses, "gradients": gradients}


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--activation-checkpointing",
        "--activation-checkpointing=op --reshard-after-forward=true",
        "--shard-granularity=layer",
        "--shard-granularity=root",
        "--shard-granularity=2",
    ],
)
def test_experts_that_one_rank_never_calls(ranks: Ranks, flags: str) -> None:
    (alone,) = ranks.run(_trained, "--strategy=none", ranks=1)
    first, second = ranks.run(_trained, flags)
    assert [loss for pair in zip(first["losses"], second["losses"], strict=True) for loss in pair] == alone["losses"]
    assert same(first["gradients"], second["gradients"])
    assert same(first["gradients"], alone["gradients"])

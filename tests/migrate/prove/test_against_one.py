"""Programs with one fault each, all named; the same ones without it, in which nothing is named; and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from migration.prove.cli import against_one
from migration.prove.launch import Failed
from tests.harness import Ranks
from tests.migrate.prove.in_pool import InPool

HERE = Path(__file__).parent
NAMED = {
    "batch_norm": "buffers",
    "buffer_never_set": "never-set",
    "dropped_samples": "dropped-samples",
    "gradients_kept": "kept-gradients",
    "loss_over_world": "factor",
    "loss_times_world": "factor",
    "lr_by_world": "settings",
    "mean_of_means": "gradients",
    "norm_by_hand": "norm-of-shards",
    "norm_of_shards": "norm-of-shards",
    "optimizer_before_sharding": "not-in-the-optimizer",
    "optimizer_of_shards": "updates",
    "own_order": "repeated-samples",
    "padded": "gradients",
    "past_the_wrapper": "drift",
    "plateau": "settings",
    "repeated_samples": "repeated-samples",
    "same_data": "same-data",
    "two_models": "drift",
    "uneven": "dropped-samples",
    "weights_by_rank": "different-weights",
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("kind", ["faulty", "sound"])
def test_the_fault_is_named_and_none_without_it(ranks: Ranks, tmp_path: Path, kind: str, name: str) -> None:
    alone, several = (InPool(HERE / kind / f"{name}.py", [], count, 60, pool=ranks) for count in (1, 2))
    found = against_one(alone, several, 8, tmp_path)
    print(found.text())
    assert [fault.kind for fault in found.faults] == ([NAMED[name]] if kind == "faulty" else [])


def test_every_program_is_tried() -> None:
    for kind in ("faulty", "sound"):
        assert {path.stem for path in (HERE / kind).glob("*.py")} == set(NAMED)


PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = torch.randn(64, 6)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data)
torch.manual_seed(rank)
for batch in BATCHES:
    (model(batch) LOSS).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
SAMPLED = "DataLoader(data, batch_size=4, sampler=sampler)"


@pytest.mark.parametrize(
    ("batches", "loss", "why"),
    [
        ("DataLoader(data.chunk(world)[rank], batch_size=4)", "", "get other samples"),  # its own half of them
        ("[data[torch.randint(64, (8 // world,))] for _ in range(4)]", "", "get other samples"),
        (f"(one + 0.1 * torch.randn_like(one) for one in {SAMPLED})", "", "draws random numbers"),
        (SAMPLED, "+ torch.randn(3)", "draws random numbers"),
        (SAMPLED.replace("data,", "[one + 0.1 * torch.randn(6) for one in data],"), "", "the values of samples differ"),
    ],
)
def test_what_may_be_meant_is_no_fault(ranks: Ranks, tmp_path: Path, batches: str, loss: str, why: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.replace("BATCHES", batches).replace("LOSS", loss))
    alone, several = (InPool(script, [], count, 60, pool=ranks) for count in (1, 2))
    with pytest.raises(Failed, match=why):
        against_one(alone, several, 4, tmp_path)

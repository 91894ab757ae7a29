"""Initial values: any part of a tensor has the values that the whole one has, and nobody draws what it doesn't hold."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fsdp2.config import parse
from fsdp2.models import initial
from fsdp2.models.initial import BLOCK, Fill, fan_in_uniform, normal, ones, reset_parameters, rows_of, xavier_uniform
from fsdp2.train import main
from tests.harness import Ranks, losses, same, small

SHAPES = [(), (1,), (7,), (0, 3), (BLOCK,), (BLOCK + 1,), (3, 70_000), (300, 7, 50)]
FILLS = {"normal": normal(1.0), "fan in": fan_in_uniform, "xavier": xavier_uniform, "ones": ones}


def whole(fill: Fill, shape: torch.Size, name: str = "x", seed: int = 1) -> Tensor:
    return rows_of(fill, name, shape, torch.float32, seed, slice(0, shape[0] if shape else 1))


@pytest.mark.parametrize("fill", FILLS)
def test_rows_are_those_of_the_whole_tensor(fill: str) -> None:
    for size in SHAPES:
        shape = torch.Size(size)
        if len(shape) < 2 and fill in ("fan in", "xavier"):
            continue  # neither has a fan
        full = whole(FILLS[fill], shape)
        assert full.shape == shape
        rows = shape[0] if shape else 0
        for start in range(0, rows, max(1, rows // 5)):
            for stop in {start, start + 1, rows}:
                part = rows_of(FILLS[fill], "x", shape, torch.float32, 1, slice(start, stop))
                assert torch.equal(part, full[start:stop])


def test_blocks_are_independent_draws_of_one_distribution() -> None:
    shape = torch.Size((5, BLOCK))
    drawn = whole(normal(0.5), shape)
    assert len({tuple(row[:8].tolist()) for row in drawn}) == 5  # no block is repeated
    # 327,680 draws: the mean's standard error is 0.0009, that of the deviation 0.0006.
    assert abs(drawn.mean().item()) < 0.005
    assert drawn.std().item() == pytest.approx(0.5, abs=0.004)
    correlation = torch.corrcoef(drawn)
    assert (correlation - torch.eye(5)).abs().max().item() < 0.02  # 5 standard errors of 65,536 pairs
    assert not torch.equal(drawn[1], whole(normal(0.5), shape, seed=2)[1])
    assert not torch.equal(drawn[1], whole(normal(0.5), shape, name="y")[1])


@pytest.mark.parametrize(("fill", "bound"), [(fan_in_uniform, 1 / 300), (xavier_uniform, math.sqrt(6 / 90_002))])
def test_the_bounds_are_those_of_the_whole_shape(fill: Fill, bound: float) -> None:
    drawn = whole(fill, torch.Size((2, 90_000)))  # more than one block
    assert bound * 0.999 < drawn.abs().max().item() <= bound


@pytest.mark.parametrize(
    ("ours", "theirs"), [(xavier_uniform, nn.init.xavier_uniform_), (normal(1.0), nn.init.normal_)]
)
def test_a_tensor_of_one_block_is_what_torch_draws(ours: Fill, theirs: Fill) -> None:
    values = []

    def both(block: Tensor, shape: torch.Size, generator: torch.Generator) -> None:
        state = generator.get_state()
        ours(block, shape, generator)
        values.append(theirs(torch.empty(shape), generator=generator.set_state(state)))  # type: ignore[call-arg]

    shape = torch.Size((40, 30))
    mine = rows_of(both, "x", shape, torch.float32, 1, slice(0, 40))
    torch.testing.assert_close(mine, values[0], rtol=1e-6, atol=0)  # a bound may be rounded differently


class Sharded(nn.Module):
    """Parameters that are placed in every way that a mesh of two dimensions allows."""

    def __init__(self, placements: list[tuple[Placement, ...]]) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
        for number, placement in enumerate(placements):
            value = distribute_tensor(torch.full((7, 20_000), math.nan), mesh, placement, src_data_rank=None)
            self.register_parameter(f"p{number}", nn.Parameter(value))


PLACEMENTS: list[tuple[Placement, ...]] = [
    (Replicate(), Shard(0)),
    (Shard(0), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(1), Shard(0)),
    (Replicate(), Shard(1)),
    (Replicate(), Replicate()),
]


def _every_placement() -> list[bool]:
    model = Sharded(PLACEMENTS)
    reset_parameters(model, {"*": normal(1.0)}, seed=1)
    found = []
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        found.append(torch.equal(parameter.full_tensor(), whole(normal(1.0), parameter.shape, name)))
    return found


def test_every_placement_gathers_to_the_same_tensor(ranks: Ranks) -> None:
    for world_size in (2, 4):
        for found in ranks.run(_every_placement, ranks=world_size):
            assert found == [True] * len(PLACEMENTS)


def _strided() -> str:
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.zeros(2, 4), mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    with pytest.raises(ValueError, match="no range of rows, and can't be drawn alone") as caught:
        initial.place_of(tensor)
    return str(caught.value)


def test_a_shard_that_is_no_range_of_rows_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(_strided):
        assert "_S" in message  # names the placement, which torch abbreviates


def _drawn(line: list[str]) -> tuple[list[tuple[str, int]], list[tuple[str, Any]]]:
    """A run's draws, (name, elements) each, and its events."""
    draws: list[tuple[str, int]] = []
    events: list[tuple[str, Any]] = []
    real = initial.rows_of

    def counting(fill: Fill, name: str, *arguments: object) -> Tensor:
        value = real(fill, name, *arguments)  # type: ignore[arg-type]
        draws.append((name, value.numel()))
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial, "rows_of", counting)
        main(parse(line), lambda kind, data: events.append((kind, data)))
    return draws, events


def test_a_rank_draws_its_shards_and_on_resume_nothing(ranks: Ranks, tmp_path: Path) -> None:
    run, uninterrupted = (small(tmp_path / name, "--checkpoint-every=1") for name in ("run", "uninterrupted"))
    first, second = ranks.run(_drawn, [*run, "--max-steps=1"])
    alone = ranks.run(_drawn, [*small(tmp_path / "alone"), "--strategy=none", "--max-steps=1"], ranks=1)[0][0]
    # The rows of every parameter are divided; buffers, which this model lacks, would be whole on both.
    both = {name: a + b for (name, a), (_, b) in zip(first[0], second[0], strict=True)}
    assert both == dict(alone)
    assert max(a for _, a in first[0]) < max(count for _, count in alone)

    resumed = ranks.run(_drawn, [*run, "--max-steps=3"])
    straight = ranks.run(_drawn, [*uninterrupted, "--max-steps=3"])
    assert [draws for draws, _ in resumed] == [[], []]
    assert same(losses(straight[0][1])[1:], losses(resumed[0][1]))

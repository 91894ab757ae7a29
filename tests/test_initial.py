"""Initial values: any part of a tensor has the values that the whole one has, and nobody draws what it doesn't hold."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fsdp2 import models
from fsdp2.config import parse
from fsdp2.models import initial
from fsdp2.models.initial import (
    BLOCK,
    PART,
    Fill,
    fan_in_uniform,
    fill_for,
    normal,
    ones,
    reset_parameters,
    rows_of,
    xavier_uniform,
)
from fsdp2.models.spec import ModelSpec
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


def as_first_written(fill: Fill, name: str, shape: torch.Size, dtype: torch.dtype, rows: slice) -> Tensor:
    """The values as the first version drew them, one block after the other in new memory; it is not to be changed."""
    wide = shape[1:].numel()
    start, stop = (rows.start * wide, rows.stop * wide) if shape else (0, 1)
    drawn = torch.empty(stop - start, dtype=dtype)
    for number in range(start // 65536, -(-stop // 65536) if stop > start else 0):
        first = number * 65536
        block = torch.empty(min(65536, shape.numel() - first), dtype=dtype)
        key = f"1/{name}" + (f"/{number}" if number else "")
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big"))
        fill(block, shape, generator)
        low, high = max(start, first), min(stop, first + len(block))
        drawn[low - start : high - start] = block[low - first : high - first]
    return drawn.view(rows.stop - rows.start, *shape[1:]) if shape else drawn.view(())


@pytest.fixture
def threads() -> Iterator[int]:
    """More of them than this machine has cores, perhaps."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


# Of seed 1 and the first size, all tensors: sha256, first 16 digits. torch draws other last bits on other processors.
WITH_AVX2 = {
    "vit": "aafe86daead6681e",
    "cnn": "5e28a95a29b97b0a",
    "transformer": "4f49c467f467c331",
    "llama": "567df4a9a80da6a7",
}


def digest(named: list[tuple[str, Tensor]]) -> str:
    found = hashlib.sha256()
    for name, tensor in named:
        found.update(name.encode() + tensor.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def built(spec: ModelSpec) -> tuple[nn.Module, list[tuple[str, Tensor]]]:
    model = spec.build(next(iter(spec.sizes)))
    return model, [*model.named_parameters(), *model.named_buffers()]


@pytest.mark.parametrize("name", models.NAMES)
def test_threads_draw_what_one_thread_drew_at_first(name: str, threads: int) -> None:
    spec = models.get(name)
    model, named = built(spec)
    reset_parameters(model, spec.initial_values, seed=1)
    for one, tensor in named:
        rows = slice(0, tensor.shape[0] if tensor.shape else 1)
        fill = fill_for(spec.initial_values, one)
        assert torch.equal(tensor, as_first_written(fill, one, tensor.shape, tensor.dtype, rows)), one
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        assert digest(named) == WITH_AVX2[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fill", [normal(0.5), fan_in_uniform])
def test_a_tensor_of_many_parts_is_as_first_written(fill: Fill, dtype: torch.dtype, threads: int) -> None:
    model = nn.Module()
    for name, shape in {"rows": (9, PART // 4 + 3), "long": (2, PART + 5), "narrow": (2 * PART + 1, 1)}.items():
        model.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype)))
    reset_parameters(model, {"*": fill}, seed=1)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, as_first_written(fill, name, tensor.shape, dtype, slice(0, len(tensor)))), name


def _shards(name: str) -> list[str]:
    """Names of the parameters whose shard isn't that of the values as first written."""
    torch.set_num_threads(3)
    spec = models.get(name)
    model, _ = built(spec)
    for block in [*spec.blocks(model), model]:
        fully_shard(block)
    reset_parameters(model, spec.initial_values, seed=1)
    torch.set_num_threads(1)
    wrong = []
    for one, tensor in model.named_parameters():
        assert isinstance(tensor, DTensor)
        rows = initial.slices_of(tensor)[0]
        fill = fill_for(spec.initial_values, one)
        expected = as_first_written(fill, one, tensor.shape, tensor.dtype, rows)
        wrong += [] if torch.equal(tensor.to_local(), expected) else [one]
    return wrong


def test_shards_of_three_ranks_are_as_first_written(ranks: Ranks) -> None:
    for name in models.NAMES:
        assert ranks.run(_shards, name, ranks=3) == [[], [], []]


def test_an_error_in_a_thread_is_raised_and_torchs_threads_come_back(threads: int) -> None:
    def fails(block: Tensor, shape: torch.Size, generator: torch.Generator) -> None:
        raise RuntimeError("a fill that fails")

    model = nn.Linear(70_000, 30)
    with pytest.raises(RuntimeError, match="a fill that fails"):
        reset_parameters(model, {"*": fails}, seed=1)


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
        initial.slices_of(tensor)
    return str(caught.value)


def test_a_shard_that_is_no_range_of_rows_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(_strided):
        assert "_S" in message  # names the placement, which torch abbreviates


def _drawn(line: list[str]) -> tuple[Counter[str], list[tuple[str, Any]]]:
    """How many elements of each tensor a run draws, and its events."""
    draws: Counter[str] = Counter()
    events: list[tuple[str, Any]] = []
    real = initial.rows_of

    def counting(fill: Fill, name: str, *arguments: Any, **named: Any) -> Tensor:
        value = real(fill, name, *arguments, **named)
        draws[name] += value.numel()
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
    assert first[0] + second[0] == alone
    assert max(first[0].values()) < max(alone.values())

    resumed = ranks.run(_drawn, [*run, "--max-steps=3"])
    straight = ranks.run(_drawn, [*uninterrupted, "--max-steps=3"])
    assert [draws for draws, _ in resumed] == [{}, {}]
    assert same(losses(straight[0][1])[1:], losses(resumed[0][1]))

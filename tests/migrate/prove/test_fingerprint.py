"""A tensor's print is the same however it is cut, and two prints say how far apart their tensors are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from migration.prove.fingerprint import Print, of, rows
from migration.prove.parts import described, parts
from migration.prove.record import Record
from tests.harness import Ranks
from tests.migrate.fsdp1_models import CPU, Net, policy


def prints(tensor: torch.Tensor) -> Print:
    return of(tensor.flatten(), torch.arange(tensor.numel()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_it_is_the_same_in_pieces(dtype: torch.dtype) -> None:
    values = torch.randn(100).mul(10).to(dtype)
    whole, index = prints(values), torch.arange(100)
    added = of(values[:37], index[:37]) + of(values[37:], index[37:])
    assert added.hash == whole.hash
    assert added.square == pytest.approx(whole.square)
    moved = values.clone()
    moved[3], moved[77] = values[77], values[3]
    assert (prints(moved).hash == whole.hash) == bool(values[3] == values[77])


def test_one_bit_is_seen_and_a_distance_estimated() -> None:
    values = torch.randn(1000)
    other = values.clone()
    other[500] = torch.nextafter(other[500], torch.tensor(9.0))
    assert prints(values).hash != prints(other).hash
    noise = torch.randn(1000)
    for size in (1e-6, 1e-3, 1.0):
        estimate = prints(values.double() + size * noise).distance(prints(values.double()))
        assert 0.3 < estimate / (size * noise.norm().item()) < 3
    assert prints(3 * values.double()).distance(prints(values.double()), 3.0) < 1e-12 * values.norm()
    assert prints(values * float("nan")).distance(prints(values)) == float("inf")


def test_samples_are_told_apart_wherever_they_stand() -> None:
    inputs, labels = torch.randn(6, 3), torch.arange(6)
    whole = rows({"x": inputs, "y": [labels]})
    assert len(set(whole)) == 6
    order = torch.randperm(6)
    assert rows({"x": inputs[order], "y": [labels[order]]}) == [whole[i] for i in order]
    assert rows((inputs, labels.flip(0)))[:1] != whole[:1]
    assert rows(["text"]) == []
    assert rows(inputs.requires_grad_()) == []


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 2 == 0 else None


def sharded(kind: str) -> list[dict[str, Any]]:
    """What this rank's recorder would write of a model's parameters and gradients."""
    torch.manual_seed(0)
    model: nn.Module = Net()
    inputs = torch.randn(4, 6)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind.startswith("fsdp1"):
        _, strategy, original = kind.split("-")
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy("transformer"),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=original == "orig",
            device_id=CPU,
        )
    elif kind.startswith("fsdp2"):
        for block in model.get_submodule("blocks").children():
            fully_shard(block, shard_placement_fn=columns if kind == "fsdp2-columns" else None)
        fully_shard(model, shard_placement_fn=columns if kind == "fsdp2-columns" else None)
    model(inputs).square().mean().backward()
    found = []
    for when, gradient in (("before", False), ("gradient", True)):
        event: dict[str, Any] = {"kind": "state", "step": 1, "when": when, "parts": {}}
        for part in parts(model):
            event["parts"].setdefault(part.name, []).extend(described(part, part.grad if gradient else part.values, {}))
        found.append(event)
    return found


FSDP1 = [f"fsdp1-{name}-{how}" for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD") for how in ("orig", "flat")]


@pytest.mark.parametrize("kind", ["ddp", *FSDP1, "fsdp2", "fsdp2-columns"])
def test_it_is_the_same_however_a_model_is_sharded(ranks: Ranks, kind: str) -> None:
    """Of FSDP1's flat parameters by what torch keeps to itself: this fails when that moves."""
    plain = Record(ranks.run(sharded, "plain", ranks=1))
    record = Record(ranks.run(sharded, kind, ranks=2))
    for when in ("before", "gradient"):
        expected, found = plain.whole(1, when), record.whole(1, when)
        assert found.keys() == expected.keys()
        assert len(found) == 22
        for name, one in found.items():
            assert one.hash == expected[name].hash, name

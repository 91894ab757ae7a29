"""Sharding flags decide which collectives are issued, how many, and in what order (never: how fast)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from fsdp2 import models
from fsdp2.parallel.shards import groups_of
from tests.harness import AllGathers, Ranks, batch, loss_of
from tests.harness import make_engine as make

Train = Callable[..., list[tuple[str, dict[str, Any]]]]


def counts(body: Callable[[], Any]) -> dict[str, int]:
    """Collectives that `body` issues, by name."""
    with CommDebugMode() as mode:
        body()
    names = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "allreduce_": "all-reduce"}
    found: dict[str, int] = {}
    for op, count in mode.get_comm_counts().items():
        name = str(op).rpartition(".")[2]
        found[names.get(name, name)] = count
    return found


def _collectives(flags: str) -> dict[str, dict[str, int]]:
    engine = make(flags)
    kept: dict[str, Tensor] = {}

    def forward() -> None:
        kept["loss"] = loss_of(engine)

    return {
        "forward": counts(forward),
        "backward": counts(lambda: engine.backward(kept["loss"], True)),
        "state dict": counts(engine.model.state_dict),
    }


@pytest.mark.parametrize(
    ("flags", "groups", "gathered_again"),
    [
        ("", 3, 1),  # two blocks and the root; the last block and the root stay gathered
        ("--reshard-after-forward=true", 3, 3),
        ("--reshard-after-forward=false", 3, 0),
        ("--shard-granularity=2", 2, 0),
        ("--shard-granularity=root", 1, 0),
        ("--shard-granularity=layer", 11, 9),  # per block two norms, attention and two linear layers
    ],
)
def test_groups_and_reshard_policy_decide_the_collectives(
    ranks: Ranks, flags: str, groups: int, gathered_again: int
) -> None:
    for result in ranks.run(_collectives, flags):
        assert result["forward"] == {"all-gather": groups}
        again = {"all-gather": gathered_again} if gathered_again else {}
        assert result["backward"] == {**again, "reduce-scatter": groups}
        assert result["state dict"] == {}, "a sharded state dict needs no communication"


def _accumulation(flags: str) -> list[dict[str, int]]:
    engine = make(flags)

    def microbatch(last: bool) -> dict[str, int]:
        return counts(lambda: engine.backward(loss_of(engine, last), last))

    return [microbatch(last) for last in (False, False, True)]


@pytest.mark.parametrize(
    ("flags", "name", "last"),
    [
        ("--grad-accumulation=3 --grad-accumulation-sync=last", "reduce-scatter", 3),
        ("--strategy=fsdp1", "reduce-scatter", 3),
        ("--strategy=ddp", "all-reduce", 1),
    ],
)
def test_accumulation_exchanges_gradients_once_a_step(ranks: Ranks, flags: str, name: str, last: int) -> None:
    for microbatches in ranks.run(_accumulation, flags):
        assert [counted.get(name, 0) for counted in microbatches] == [0, 0, last]


def _sync_after_an_error() -> int:
    engine = make("--grad-accumulation=2 --grad-accumulation-sync=last")
    loss = loss_of(engine, last=False)
    loss.register_hook(_explode)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss, last_microbatch=False)
    groups_of(engine.model)[0].reshard()
    engine = make("--grad-accumulation=2 --grad-accumulation-sync=last")
    engine.backward(loss_of(engine, last=False), last_microbatch=False)
    return counts(lambda: nn.functional.cross_entropy(engine.model(batch().inputs), torch.arange(4)).backward())[
        "reduce-scatter"
    ]


def _explode(gradient: Tensor) -> None:
    raise ZeroDivisionError


def test_a_microbatch_leaves_gradient_exchange_on(ranks: Ranks) -> None:
    # A backward outside of the engine, after one that didn't exchange: it must exchange again.
    assert ranks.run(_sync_after_an_error) == [3, 3]


def _note(events: list[str], event: str, module: nn.Module, inputs: Any) -> None:
    events.append(event)


def _order(flags: str) -> list[str]:
    engine = make(flags)
    blocks = models.get("vit").blocks(engine.model)
    events: list[str] = []
    with AllGathers(lambda size: events.append("gather")):
        for index, block in enumerate(blocks):
            # After FSDP's own hooks, which were registered first.
            block.register_forward_pre_hook(partial(_note, events, f"forward {index}"))
            block.register_full_backward_pre_hook(partial(_note, events, f"backward {index}"))
        engine.begin_step()
        events.append("data")
        engine.backward(loss_of(engine), True)
    return events


def test_prefetch_moves_all_gathers_forward(ranks: Ranks) -> None:
    implicit = ranks.run(_order, "--reshard-after-forward=true")[0]
    assert implicit[:6] == ["data", "gather", "gather", "forward 0", "gather", "forward 1"]
    explicit = ranks.run(_order, "--reshard-after-forward=true --explicit-prefetching=1")[0]
    # The root before the data is there; with block 0 also block 1.
    assert explicit[:6] == ["gather", "data", "gather", "gather", "forward 0", "forward 1"]
    assert implicit.count("gather") == explicit.count("gather") == 6


def test_backward_prefetch_alone_leaves_forward_as_it_was(ranks: Ranks) -> None:
    flags = "--reshard-after-forward=true --model-size=seed --shard-granularity=1"
    backward = ranks.run(_order, f"{flags} --backward-prefetch=3", timeout=200)[0]
    plain = ranks.run(_order, flags, timeout=200)[0]
    early = backward.index("gather") < backward.index("data")
    assert early, "any explicit prefetch gathers the root early"
    forward_part = [event for event in backward[: backward.index("backward 9")] if event != "data"]
    plain_part = [event for event in plain[: plain.index("backward 9")] if event != "data"]
    assert [e for e in forward_part if e.startswith("f")] == [e for e in plain_part if e.startswith("f")]
    # At the first backward of a block, three groups ahead of it have been asked for.
    gathers = backward[backward.index("forward 9") : backward.index("backward 8")].count("gather")
    assert gathers > plain[plain.index("forward 9") : plain.index("backward 8")].count("gather")


def test_hsdp_all_reduces_between_replicas(ranks: Ranks) -> None:
    for result in ranks.run(_collectives, "--replicas=2", ranks=4):
        assert result["backward"]["all-reduce"] == 3
        assert result["backward"]["reduce-scatter"] == 3

"""The ledger's count of memory agrees with one by hand, in bytes."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2.parallel.engine import Engine
from fsdp2_extra.allocations.ledger import Ledger, MemoryLimitReached
from fsdp2_extra.allocations.recorder import Recorder
from fsdp2_extra.allocations.timeline import Timeline
from tests.harness import Ranks, batch, make_engine


def test_storages_are_counted_and_not_tensors() -> None:
    with Ledger() as ledger:
        first = torch.zeros(1000)
        view = first.view(10, 100)[2:]
        first.add_(1)
        assert ledger.live_bytes == 4000
        del first
        assert ledger.live_bytes == 4000, "the view still has it"
        del view
        assert ledger.live_bytes == 0
        torch.ones(10) + torch.ones(10)
        assert ledger.live_bytes == 0
    assert ledger.peak_bytes == 4000
    assert [allocation.bytes for allocation in ledger.allocations] == [4000, 40, 40, 40]


def test_memory_that_is_resized_behind_its_tensor_is_seen() -> None:
    with Ledger() as ledger:
        tensor = torch.zeros(1000)
        tensor.untyped_storage().resize_(0)
        assert ledger.live_bytes == 0
        tensor.untyped_storage().resize_(4000)
        assert ledger.live_bytes == 4000
    assert {allocation.kind for allocation in ledger.allocations} == {"gathered parameters"}
    assert "resize_" not in vars(torch.UntypedStorage)


def test_activations_by_hand() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 5))
    engine = Engine(model, torch.optim.Adam(model.parameters()), torch.amp.GradScaler(enabled=False))
    with Ledger() as ledger:
        ledger.watch(model, engine.held())
        ledger.phase("data", 1)
        inputs, targets = torch.randn(8, 10), torch.arange(8) % 5
        ledger.phase("forward", 1)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        ledger.phase("backward", 1)
        alive = [a for a in ledger.alive() if a.kind == "activations"]
        loss.backward()
        ledger.mark("gradients", engine.held()["gradients"])
    # What the first linear layer and GELU put out, the logits' log-softmax, which the loss keeps, its total weight and
    # the loss itself. The logits are gone.
    assert sorted(a.bytes for a in alive) == sorted([8 * 20 * 4, 8 * 20 * 4, 8 * 5 * 4, 4, 4])
    assert [a.module for a in alive] == ["0", "1", "", "", ""]
    gradients = sum(a.bytes for a in ledger.allocations if a.kind == "gradients")
    assert gradients == sum(p.numel() * 4 for p in model.parameters())
    assert sum(a.bytes for a in ledger.allocations if a.kind == "data" and a.died is None) == 8 * 10 * 4 + 8 * 8


def test_the_limit_ends_it_once() -> None:
    with Ledger(limit=5000):
        first = torch.zeros(1000)
        with pytest.raises(
            MemoryLimitReached, match=r"--memory-limit 5000: 8000 bytes of tensors with the 4000 of zeros"
        ):
            torch.zeros(1000)
        assert torch.zeros(1000).numel() == first.numel(), "what ends a run may need memory too"


def test_what_is_forgotten_is_neither_alive_nor_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp2_extra.allocations.ledger.MAX_ENTRIES", 10)
    with Ledger() as ledger:
        kept = torch.zeros(10)
        torch.zeros(1000) + torch.zeros(1000)
        for _ in range(100):
            torch.zeros(10)
    assert len(ledger.allocations) < 30
    line = Timeline({}, ledger.allocations, ledger.phases, ledger.collectives)
    assert line.peak()[1] == ledger.peak_bytes == 12040
    assert kept.numel() == 10
    assert ledger.complete_from > 0


def _recorded(flags: str, steps: int = 2) -> dict[str, Any]:
    """By kind, what is alive at the end of each phase of the last step, and what a count by hand says."""
    engine = make_engine(flags)
    recorder = Recorder(engine, torch.device("cpu"), {"rank": 0}, None, None)
    ends: dict[str, dict[str, int]] = {}
    with recorder:
        for step in range(1, steps + 1):
            _step(engine, recorder, step, ends)
    line = recorder.timeline()
    at, most = line.peak()
    return {
        "ends": ends,
        "peak": most,
        "at peak": line.by_kind(at),
        # FSDP pads the shards of ranks that have fewer rows, so their storages are larger than their tensors.
        "parameters": sum(_storages(engine.model.parameters()).values()),
        "shards": sum(_local(p).nbytes for p in engine.model.parameters()),
        "whole": sum(p.numel() * 4 for p in engine.model.parameters()),
        "optimizer": sum(
            _local(t).nbytes for state in engine.optimizer.state.values() for t in state.values() if torch.is_tensor(t)
        ),
        "collectives": sorted((c.name, c.bytes) for c in line.collectives if c.step == steps),
    }


def _step(engine: Engine, recorder: Recorder, step: int, ends: dict[str, dict[str, int]]) -> None:
    def end(phase: str) -> None:
        sizes: dict[str, int] = {}
        for allocation in recorder.ledger.alive():
            sizes[allocation.kind or ""] = sizes.get(allocation.kind or "", 0) + allocation.bytes
        ends[phase] = sizes

    recorder.phase("data", step)
    data = batch()
    targets = torch.arange(4)
    recorder.phase("forward", step)
    loss = nn.functional.cross_entropy(engine.forward(data).float(), targets)
    recorder.ledger.phase("between", step)
    end("forward")
    recorder.phase("backward", step)
    engine.backward(loss, last_microbatch=True)
    del loss
    recorder.phase("optimizer", step)
    end("backward")
    engine.clip(None)
    engine.step()
    gc.collect()
    end("step")


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address -> bytes of the memory behind tensors, some of which share it."""
    storages = [_local(tensor).untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("flags", ["", "--strategy=ddp", "--strategy=fsdp1", "--optimizer=sgd"])
def test_parameters_gradients_and_optimizer_state_agree_with_a_count_of_their_own(ranks: Ranks, flags: str) -> None:
    results = ranks.run(_recorded, flags)
    assert results[0]["parameters"] == results[0]["shards"], "rank 0 has the most rows and no padding"
    for result in results:
        after_backward = result["ends"]["backward"]
        assert after_backward["parameters"] == result["parameters"]
        assert after_backward["optimizer"] == result["optimizer"]
        # FSDP pads shards of odd sizes for its collectives, and gradients are slices of what those return.
        assert result["parameters"] <= after_backward["gradients"] <= result["parameters"] * 1.05
        # Whatever zero_grad says, FSDP1 keeps them until the next forward, and DDP the buckets that they are views of.
        kept = after_backward["gradients"] if flags in ("--strategy=fsdp1", "--strategy=ddp") else 0
        assert result["ends"]["step"].get("gradients", 0) == kept


def test_parameters_are_freed_after_forward_as_the_policy_says(ranks: Ranks) -> None:
    gathered = {
        policy: [r["ends"]["forward"].get("gathered parameters", 0) for r in ranks.run(_recorded, flags)]
        for policy, flags in [
            ("true", "--reshard-after-forward=true"),
            ("default", ""),
            ("false", "--reshard-after-forward=false"),
        ]
    }
    assert gathered["true"] == [0, 0]
    (whole,) = {result["whole"] for result in ranks.run(_whole)}
    for default, kept in zip(gathered["default"], gathered["false"], strict=True):
        assert 0 < default < kept, "the root and the last group are kept"
        assert whole <= kept <= whole * 1.05  # padded


def _whole() -> dict[str, int]:
    return {"whole": sum(p.numel() * 4 for p in make_engine("--strategy=ddp").model.parameters())}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_halves_activations(ranks: Ranks, dtype: str) -> None:
    full = ranks.run(_recorded, "")
    half = ranks.run(_recorded, f"--mixed-precision={dtype}")
    for a, b in zip(full, half, strict=True):
        ratio = b["ends"]["forward"]["activations"] / a["ends"]["forward"]["activations"]
        # Not quite: layer norm keeps its statistics, and the loss its inputs, in fp32.
        assert 0.48 < ratio < 0.56


def test_recomputing_leaves_a_blocks_input(ranks: Ranks) -> None:
    full, less = ranks.run(_recorded, ""), ranks.run(_recorded, "--activation-checkpointing")
    for a, b in zip(full, less, strict=True):
        assert b["ends"]["forward"]["activations"] < 0.3 * a["ends"]["forward"]["activations"]


def test_collectives_have_names_and_bytes(ranks: Ranks) -> None:
    for result in ranks.run(_recorded, "--strategy=ddp"):
        exchanged = [(name, count) for name, count in result["collectives"] if name == "all-reduce"]
        assert exchanged == [("all-reduce", result["whole"])]
    for result in ranks.run(_recorded, "--shard-granularity=root"):
        names = [name for name, _ in result["collectives"]]
        assert names.count("all-gather") == 1
        assert names.count("reduce-scatter") == 1
    # FSDP1 gathers into a list of tensors, FSDP2 into one: the same bytes, but for FSDP1's padding of its flat shards.
    gathered = [
        sum(count for name, count in ranks.run(_recorded, flags)[0]["collectives"] if "gather" in name)
        for flags in ("--strategy=fsdp1 --fsdp1-sharding=shard-grad-op", "--reshard-after-forward=false")
    ]
    assert gathered[0] == pytest.approx(gathered[1], rel=0.05)


def _copies() -> list[tuple[int, str | None, bool]]:
    exchanged, whole = torch.empty(1000), torch.ones(2000)
    with Ledger() as ledger:
        for _ in range(20):
            dist.reduce_scatter_tensor(exchanged, whole)
            exchanged.add_(1)
    copies = [one for one in ledger.allocations if one.operation == "split"]
    # Each has ended with the operation after its exchange, and not when gloo's thread got the interpreter's lock.
    overlap = [a.died is None or a.died > b.born for a, b in itertools.pairwise(copies)]
    alive = [one for one in ledger.allocations if one.died is None and one.operation == "split"]
    return [(one.bytes, one.kind, late) for one, late in zip(copies, [*overlap, bool(alive)], strict=True)]


def test_gloos_copy_of_a_reduce_scatter_ends_at_its_last_use(ranks: Ranks) -> None:
    for found in ranks.run(_copies):
        assert found == [(8000, "communication", False)] * 20

"""When the microbatches of a step exchange their gradients: `--grad-accumulation-sync every|last|replica`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp2.parallel.shards import local
from fsdp2_extra.allocations.ledger import Ledger
from tests.harness import Ranks, batch, losses, make_engine, relative

Train = Callable[..., list[tuple[str, dict[str, Any]]]]
K = "--grad-accumulation=3"


def _loss(engine: Any, index: int, last: bool) -> Tensor:
    images = batch(last)
    images.inputs = images.inputs * (index + 1)
    return nn.functional.cross_entropy(engine.forward(images).float(), torch.arange(4))


def _accumulate(engine: Any, microbatches: int = 3) -> None:
    """A step's microbatches; the second of rank 1 and the last of rank 0 are placeholders that count nothing."""
    for index in range(microbatches):
        last = index == microbatches - 1
        placeholder = (dist.get_rank(), index) in ((1, 1), (0, 2))
        engine.backward(_loss(engine, index, last) * (0.0 if placeholder else 1.0), last)


def _gradients(flags: list[str], microbatches: int) -> list[dict[str, Tensor]]:
    """Whole gradients of the second step by name, for each command line. (The first has none but the head's.)"""
    found = []
    for line in flags:
        engine = make_engine(f"{line} {K} --optimizer=sgd --lr=0.1")
        _accumulate(engine, microbatches)
        engine.step()
        _accumulate(engine, microbatches)
        full = {n.removeprefix("module."): p.grad for n, p in engine.model.named_parameters() if p.grad is not None}
        assert all(bool(local(gradient).any()) for gradient in full.values() if local(gradient).numel())
        found.append({name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in full.items()})
    return found


def _apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of gradients, relative to the largest of the same parameter."""
    assert ours.keys() == theirs.keys() != set()
    return max(
        float((gradient - theirs[name]).abs().max() / theirs[name].abs().max()) for name, gradient in ours.items()
    )


MODES = [f"--grad-accumulation-sync={mode}" for mode in ("every", "last")]
HSDP = [f"--replicas=2 --grad-accumulation-sync={mode}" for mode in ("every", "last", "replica")]


def test_modes_add_up_the_same_gradients_on_two_ranks(ranks: Ranks) -> None:
    offloaded = f"{MODES[0]} --cpu-offload"
    lines = ["--strategy=ddp", *MODES, offloaded, *HSDP]
    results = ranks.run(_gradients, lines, 3)
    for found in results:
        by_line = dict(zip(lines, found, strict=True))
        # Summed on each rank first, then over ranks: what DDP does as well.
        assert _apart(by_line[MODES[1]], by_line["--strategy=ddp"]) == 0
        # Two replicas of an unsharded model have nothing to sum but that.
        assert _apart(by_line[HSDP[2]], by_line[HSDP[1]]) == 0
        # Over ranks first: the same terms, added in another order. Whether that rounds differently depends on the CPU.
        assert _apart(by_line[MODES[0]], by_line[MODES[1]]) < 1e-5
        assert _apart(by_line[HSDP[0]], by_line[MODES[0]]) == 0
        assert _apart(by_line[offloaded], by_line[MODES[0]]) == 0


def test_modes_agree_on_four_ranks(ranks: Ranks) -> None:
    for found in ranks.run(_gradients, [MODES[0], *HSDP], 3, ranks=4):
        assert all(_apart(gradients, found[0]) < 1e-5 for gradients in found[1:])


def _between_microbatches(flags: str, held: str) -> tuple[int, int, bool]:
    """Bytes that a microbatch leaves behind; those of `whole` gradients or of `padded` shards; whether shards exist."""
    engine = make_engine(f"{flags} {K}")
    parameters = list(engine.model.parameters())
    rows = {"whole": [p.shape[0] for p in parameters], "padded": [-(-p.shape[0] // 2) for p in parameters]}[held]
    expected = sum(n * (p.numel() // p.shape[0]) * 4 for n, p in zip(rows, parameters, strict=True))
    _accumulate(engine)  # what torch sets up in a first step isn't counted
    engine.step()
    with Ledger() as ledger:
        ledger.watch(engine.model, engine.held())
        before = ledger.live_bytes
        engine.backward(_loss(engine, 0, False), False)
        # A thread of gloo's lets go of what a collective was given a moment after the collective has returned.
        deadline = time.monotonic() + 2
        while (after := ledger.live_bytes) > before + expected and time.monotonic() < deadline:
            time.sleep(0.01)
    return after - before, expected, bool(engine.gradients())


@pytest.mark.parametrize("flags", ["", "--mixed-precision"])
def test_only_last_holds_whole_gradients_between_microbatches(ranks: Ranks, flags: str) -> None:
    for line, held in ((MODES[0], "padded"), (MODES[1], "whole")):  # also in bf16: the reduce dtype is fp32
        for found, expected, sharded in ranks.run(_between_microbatches, f"{line} {flags}", held):
            assert found == expected
            assert sharded == (held == "padded")


def test_replica_holds_a_shard_between_microbatches(ranks: Ranks) -> None:
    for line, held in ((HSDP[0], "padded"), (HSDP[1], "whole"), (HSDP[2], "padded")):
        for found, expected, _ in ranks.run(_between_microbatches, line, held, ranks=4):
            assert found == expected


def _counts(flags: str) -> list[tuple[int, int]]:
    """Reduce-scatters and all-reduces of each microbatch of a step."""
    engine = make_engine(f"{flags} {K}")
    found = []
    for index in range(3):
        with CommDebugMode() as mode:
            engine.backward(_loss(engine, index, index == 2), index == 2)
        counts = {str(op).rpartition(".")[2]: count for op, count in mode.get_comm_counts().items()}
        found.append((counts.get("_reduce_scatter_base_", 0), counts.get("allreduce_", 0)))
    return found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (HSDP[0], [(3, 3), (3, 3), (3, 3)]),
        (HSDP[1], [(0, 0), (0, 0), (3, 3)]),
        (HSDP[2], [(3, 0), (3, 0), (3, 3)]),
    ],
)
def test_modes_decide_what_a_microbatch_exchanges(ranks: Ranks, line: str, expected: list[tuple[int, int]]) -> None:
    assert ranks.run(_counts, line, ranks=4) == [expected] * 4


def _explode(gradient: Tensor) -> None:
    raise ZeroDivisionError


def _after_an_error(flags: str) -> dict[str, int]:
    """What a backward outside of the engine exchanges when one inside has failed half-way through a step."""
    engine = make_engine(f"{flags} {K}")
    loss = _loss(engine, 0, False)
    loss.register_hook(_explode)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss, last_microbatch=False)
    with CommDebugMode() as mode:
        nn.functional.cross_entropy(engine.model(batch().inputs), torch.arange(4)).backward()
    return {str(op).rpartition(".")[2]: count for op, count in mode.get_comm_counts().items()}


@pytest.mark.parametrize("line", HSDP)
def test_a_failed_microbatch_leaves_the_exchange_on(ranks: Ranks, line: str) -> None:
    for found in ranks.run(_after_an_error, line, ranks=4):
        assert (found["_reduce_scatter_base_"], found["allreduce_"]) == (3, 3)


def _overflow(flags: str) -> tuple[bool, float, bool]:
    """An overflow in the first of three microbatches, on rank 1 alone."""
    engine = make_engine(f"{flags} {K} --mixed-precision=fp16")
    before = [local(p).clone() for p in engine.model.parameters()]
    scale = engine.scaler.get_scale()
    for index in range(3):
        overflow = torch.inf if dist.get_rank() == 1 and index == 0 else 1.0
        engine.backward(_loss(engine, index, index == 2) * overflow, index == 2)
    engine.clip(1.0)
    updated = engine.step()
    same = all(torch.equal(a, local(p)) for a, p in zip(before, engine.model.parameters(), strict=True))
    return updated, engine.scaler.get_scale() / scale, same


@pytest.mark.parametrize("line", [*MODES, HSDP[2]])
def test_an_overflow_in_one_microbatch_skips_the_step_on_all_ranks(ranks: Ranks, line: str) -> None:
    n = 4 if "replicas" in line else 2
    assert ranks.run(_overflow, line, ranks=n) == [(False, 0.5, True)] * n


@pytest.mark.losses_alone
def test_losses_of_the_modes(train: Train) -> None:
    # A global batch of 33 on 2 ranks: shares of 17 and 16, in microbatches of 9, 8 and 8, 8.
    flags = ["--grad-accumulation=2", "--global-batch-size=33"]
    last = losses(train(*flags, "--grad-accumulation-sync=last", run="last"))
    for strategy in ("ddp", "fsdp1"):
        assert losses(train(*flags, "--strategy", strategy, run=strategy)) == last
    every = losses(train(*flags, run="every"))
    assert relative(every, last) < 1e-5
    variant = ["--shard-granularity=2", "--explicit-prefetching", "--reshard-after-forward=true"]
    assert losses(train(*flags, *variant, run="variant")) == every


@pytest.mark.losses_alone
def test_no_microbatch_of_a_global_batch_is_larger_than_the_batch_size(train: Train) -> None:
    def said(events: list[tuple[str, dict[str, Any]]], text: str) -> bool:
        return any(text in line for kind, data in events if kind == "start" for line in data["header"])

    given = train("--grad-accumulation=3", run="given")
    found = train("--global-batch-size=96", run="found")
    alone = train("--global-batch-size=96", run="alone", n=1)  # as after the loss of a rank
    assert losses(found) == losses(given)
    assert relative(losses(alone), losses(given)) < 1e-5  # sums are rounded in another order
    assert said(found, "global batch 96 = 16 a microbatch x 3 accumulated x 2 data-parallel ranks")
    assert said(alone, "global batch 96 = 16 a microbatch x 6 accumulated x 1 data-parallel rank")

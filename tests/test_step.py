"""One optimizer step: recomputation, clipping, the gradient scaler, optimizer state, compilation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2.parallel import OPTIMIZERS
from fsdp2.parallel.activation_checkpointing import EXPENSIVE
from fsdp2.parallel.fully_sharded import FSDP2Engine
from fsdp2.parallel.mesh import make_mesh
from fsdp2.parallel.optimizer import plain_optimizer
from tests.harness import Ranks, loss_of
from tests.harness import make_engine as make

Train = Callable[..., list[tuple[str, dict[str, Any]]]]


class Count(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] = self.found.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def _recomputed(flags: str) -> dict[str, int]:
    engine = make(flags)
    loss = loss_of(engine)
    with Count() as count:
        engine.backward(loss, True)
    return count.found


def test_activation_checkpointing_recomputes_blocks_or_only_what_is_cheap(ranks: Ranks) -> None:
    plain, block, op = (
        ranks.run(_recomputed, flags)[0]
        for flags in ("", "--activation-checkpointing", "--activation-checkpointing=op")
    )
    gelu, linear = "aten.gelu.default", "aten.addmm.default"
    assert [count.get(gelu, 0) for count in (plain, block, op)] == [0, 2, 2]
    assert plain.get(linear, 0) == op.get(linear, 0) == 0
    assert block[linear] > 0


def test_op_recomputation_keeps_attention_by_every_kernel() -> None:
    for op in EXPENSIVE - {torch.ops.higher_order.flex_attention}:  # of Python's, which is there if its name is
        assert torch._C._dispatch_has_kernel(op.name()), f"{op} is no operator of this torch"
    # All fused forms that this torch can choose. The other two are made of products, which are kept themselves.
    fused = {
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::_scaled_dot_product_")
        and not schema.name.endswith(("_backward", "_mps", "_math"))
    }
    assert fused
    assert fused <= {op.name().partition(".")[0] for op in EXPENSIVE}


def _statistics() -> list[Tensor]:
    """A batch norm's running means: as each rank's batch made them, as an evaluation has them, and after it."""
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm)
    fully_shard(model)
    engine = FSDP2Engine(model, None, torch.amp.GradScaler("cpu", enabled=False), early_unshard=False)
    model(torch.full((2, 4), float(10 * (1 + dist.get_rank()))) + torch.tensor([[0.0], [2.0]]))
    found = [cast(Tensor, norm.running_mean).clone()]
    with engine.evaluating():
        found.append(cast(Tensor, norm.running_mean).clone())
    return [*found, cast(Tensor, norm.running_mean).clone()]


def test_the_running_statistics_of_rank_0_are_those_of_the_model(ranks: Ranks) -> None:
    (own, *later), (other, *others) = ranks.run(_statistics)
    assert not torch.equal(own, other)
    for statistics in (*later, *others):
        assert torch.equal(statistics, own)


def _norms() -> list[tuple[float, float, int]]:
    """For models sharded by one mesh and by several: this engine's norm, that of the full gradients, all-reduces."""
    flat, rows = make_mesh("cpu", 4), make_mesh("cpu", 4, replicas=2)
    found = []
    for meshes in ([flat, flat], [rows, rows], [flat, rows["shard"]], [flat, rows], [rows, rows["shard"]]):
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 8))
        for layer, mesh in zip(model, meshes, strict=True):
            fully_shard(layer, mesh=mesh)
        torch.manual_seed(3)
        full = [torch.randn(parameter.shape) for parameter in model.parameters()]
        for parameter, gradient in zip(model.parameters(), full, strict=True):
            assert isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        engine = FSDP2Engine(model, None, torch.amp.GradScaler("cpu", enabled=False), early_unshard=False)
        with CommDebugMode() as collectives:
            norm = engine._total_norm(gradients)
        expected = torch.cat([gradient.flatten() for gradient in full]).norm()
        found.append((float(norm), float(expected), collectives.get_total_counts()))
    return found


def test_the_norm_is_that_of_the_full_gradients_also_on_several_meshes(ranks: Ranks) -> None:
    results = ranks.run(_norms, ranks=4)
    assert results == [results[0]] * 4
    for norm, expected, _ in results[0]:
        assert norm == pytest.approx(expected, rel=1e-6)
    assert [count for _, _, count in results[0]] == [1, 1, 2, 2, 2]


# What the help says of each, in torch's own words.
IN_TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_exists_at_step_zero_and_changes_nothing(name: str) -> None:
    def trained(*, ours: bool) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(3, 3)
        before = layer.weight.detach().clone()
        if ours:
            optimizer = plain_optimizer(name, layer.parameters(), lr=0.1)
            assert torch.equal(layer.weight, before)
            assert len(optimizer.state) == 2
            assert all(float(s["step"]) == 0 for s in optimizer.state.values() if "step" in s)
            assert layer.weight.grad is None
        else:
            optimizer = IN_TORCH[name](layer.parameters(), lr=0.1)
        for _ in range(3):
            layer(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return layer.weight.detach()

    assert torch.equal(trained(ours=True), trained(ours=False))


def _clipped(flags: str) -> tuple[float, float]:
    engine = make(flags)
    engine.backward(loss_of(engine), True)
    before = float(engine.clip(0.01))
    return before, float(engine.clip(None))


@pytest.mark.parametrize("flags", ["", "--strategy=ddp", "--strategy=fsdp1", "--cpu-offload"])
def test_clipping_bounds_the_norm_on_every_rank(ranks: Ranks, flags: str) -> None:
    results = ranks.run(_clipped, flags)
    assert results[0] == results[1]
    before, after = results[0]
    assert before > 0.1
    assert after == pytest.approx(0.01, rel=1e-4)  # torch adds 1e-6 to the norm that it divides by


def _norm(flags: str) -> float:
    engine = make(flags)
    engine.backward(loss_of(engine), True)
    return float(engine.clip(None))


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1", "ddp"])
def test_the_norm_is_that_of_unscaled_gradients(ranks: Ranks, strategy: str) -> None:
    scaled = ranks.run(_norm, f"--strategy={strategy} --mixed-precision=fp16")
    assert scaled[0] == scaled[1]
    # fp16 has 3 to 4 digits; the loss scale is 65536.
    assert scaled[0] == pytest.approx(ranks.run(_norm, f"--strategy={strategy}")[0], rel=1e-2)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _overflow_on_one_rank(flags: str) -> list[Any]:
    engine = make(flags)
    results: list[Any] = []
    for overflow in (True, False):
        before = [p.detach().clone() for p in engine.model.parameters()]
        engine.backward(loss_of(engine), True)
        if overflow and dist.get_rank() == 1:
            # In one element of one shard, which the other rank doesn't have.
            shards = [local(p.grad) for p in engine.model.parameters() if p.grad is not None]
            next(shard for shard in shards if shard.numel()).view(-1)[0] = math.inf
        engine.clip(None)
        updated, scale = engine.step(), engine.scaler.get_scale()
        after = list(engine.model.parameters())
        unchanged = all(torch.equal(local(a), local(b)) for a, b in zip(before, after, strict=True))
        results.append((updated, scale, unchanged))
    return results


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Ranks, strategy: str) -> None:
    first, second = ranks.run(_overflow_on_one_rank, f"--mixed-precision=fp16 --strategy={strategy}")
    for skipped, done in (first, second):
        assert skipped == (False, 32768.0, True)
        assert done[:2] == (True, 32768.0)
    # The head starts at zero, so at first it alone has a gradient; with FSDP1 only one rank holds it.
    assert not (first[1][2] and second[1][2])


def test_a_skipped_step_is_in_the_metrics(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    events = train("--mixed-precision=fp16", "--optimizer=sgd", "--lr=900", steps=12)
    records = [data for kind, data in events if kind == "train"]
    assert all("loss_scale" in record for record in records)
    assert any(record["skipped"] for record in records), "a learning rate of 900 overflows fp16"


def _compiled() -> list[float]:
    engine = make("--compile --model=cnn")
    losses = []
    for _ in range(2):
        loss = loss_of(engine)
        engine.backward(loss, True)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
def test_compile_each_block(ranks: Ranks) -> None:
    for losses in ranks.run(_compiled, timeout=280):
        assert losses[1] != losses[0]
        assert all(map(math.isfinite, losses))

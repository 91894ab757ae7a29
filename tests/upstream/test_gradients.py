"""Norms, divisors, accumulation and dtypes of gradients: docs/upstream.md, "Gradients and precision"."""

from __future__ import annotations

import gc
import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tests.harness import Ranks
from tests.upstream.common import TORCH, Branches, error_of, fully_shard, gone, new_group, still

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _layer() -> nn.Linear:
    layer = nn.Linear(4, 4, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def _input() -> Tensor:
    return torch.full((1, 4), float(dist.get_rank() + 1))


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _norms() -> tuple[float, float, str]:
    """The norm that clipping returns, the true one, and what clipping says of a model on two meshes."""
    flat = fully_shard(_layer())
    flat(_input()).square().sum().backward()
    true = float(_whole(flat.weight.grad).norm())
    found = torch.nn.utils.clip_grad_norm_(flat.parameters(), 1e9)
    hybrid = fully_shard(_layer(), mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
    hybrid(_input()).sum().backward()
    both = [*flat.parameters(), *hybrid.parameters()]
    return found.item(), true, error_of(lambda: torch.nn.utils.clip_grad_norm_(both, 1.0))


def test_the_norm_of_one_mesh_is_that_of_all_ranks_and_of_two_an_error(ranks: Ranks) -> None:
    for found, true, message in ranks.run(_norms):
        gone(found != pytest.approx(true, rel=1e-6), "pytorch/pytorch#170862")
        still("must have the same mesh" in message, "pytorch/pytorch#180346")


def _sums() -> tuple[Tensor, Tensor, bool]:
    """Gradients of a loss that is divided by all samples already: of FSDP2 without its division, and of DDP."""
    sharded, replicated = fully_shard(_layer()), nn.parallel.DistributedDataParallel(_layer())
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)  # gloo has no operation that multiplies first
    for model in (sharded, replicated):
        model(_input()).sum().backward()
    return (
        _whole(sharded.weight.grad),
        _whole(replicated.module.weight.grad),
        hasattr(replicated, "set_gradient_divide_factor"),
    )


def test_ddp_divides_by_the_ranks_and_cannot_be_told_otherwise(ranks: Ranks) -> None:
    for sharded, replicated, can_be_told in ranks.run(_sums):
        assert torch.equal(sharded, torch.full((4, 4), 3.0))
        still(torch.equal(replicated, sharded / 2) and not can_be_told, "pytorch/torchtitan#2318")


def _means() -> tuple[Tensor, Tensor]:
    """FSDP2's gradient of each rank's mean over its tokens, and that of the mean over all tokens."""
    tokens = [torch.ones(1, 4), torch.arange(12.0).view(3, 4)]
    model, alone = fully_shard(_layer()), _layer()
    model(tokens[dist.get_rank()]).square().mean(1).mean().backward()
    alone(torch.cat(tokens)).square().mean(1).mean().backward()
    return _whole(model.weight.grad), _whole(alone.weight.grad)


def test_a_mean_of_means_is_not_the_mean_over_tokens(ranks: Ranks) -> None:
    for found, true in ranks.run(_means):
        still(not torch.allclose(found, true, rtol=0.1), "pytorch/torchtitan#1842")


def _held() -> int:
    tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())


def _between_microbatches() -> tuple[int, int]:
    """Bytes that a rank holds more after a microbatch without an exchange, and those of the gradients in fp32."""
    model = fully_shard(nn.Linear(64, 64, bias=False), mp_policy=BF16)
    model.set_requires_gradient_sync(False)
    x = torch.randn(1, 64)
    before = _held()
    model(x).sum().backward()
    model.reshard()
    return _held() - before, 64 * 64 * 4


def test_without_an_exchange_each_rank_holds_whole_gradients(ranks: Ranks) -> None:
    for more, gradients in ranks.run(_between_microbatches):
        still(more >= gradients, "verl-project/verl#7458")


def _late_parameter() -> str:
    model = fully_shard(Branches(), mp_policy=BF16)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 4), False).sum().backward()
    model.set_requires_gradient_sync(True)
    return error_of(lambda: model(torch.ones(1, 4), True).sum().backward())


@pytest.mark.skipif(TORCH < (2, 15), reason="torch 2.11 and 2.13 raise an AssertionError")
def test_a_parameter_may_be_first_used_in_the_last_microbatch(ranks: Ranks) -> None:
    gone(any(ranks.run(_late_parameter)), "pytorch/pytorch#196996")


def _two_dtypes() -> str:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()), mp_policy=BF16)
    return error_of(lambda: model(torch.ones(1, 4)).sum().backward())


def test_a_group_of_two_dtypes_is_an_error(ranks: Ranks) -> None:
    for message in ranks.run(_two_dtypes):
        still("uniform original parameter dtype" in message, "pytorch/pytorch#156784")


def _unused_on_one_rank() -> str:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # groups made now compare what ranks call; others die, or hang
    try:
        mesh = DeviceMesh.from_group(new_group(timeout=timedelta(seconds=20)), "cpu")
        model = fully_shard(Branches(), mesh=mesh)
        return error_of(lambda: model(torch.ones(1, 4), dist.get_rank() == 0).sum().backward())
    finally:
        dist.set_debug_level(level)


def test_a_parameter_that_one_rank_does_not_use_breaks_the_exchange(ranks: Ranks) -> None:
    for message in ranks.run(_unused_on_one_rank):
        still("Detected mismatch between collectives" in message, "pytorch/pytorch#158719")


class _Rotated(nn.Linear):
    """Notes the dtype in which it gets what another module has computed in fp32."""

    seen: torch.dtype

    def forward(self, x: Tensor, cos: Tensor | None = None) -> Tensor:
        assert cos is not None
        self.seen = cos.dtype
        return super().forward(x)


def _cast_inputs() -> torch.dtype:
    model = fully_shard(_Rotated(4, 4), mp_policy=BF16)
    model(torch.ones(1, 4), torch.ones(4))
    seen: torch.dtype = model.seen
    return seen


def test_inputs_in_fp32_are_cast_at_the_entrance_of_each_group(ranks: Ranks) -> None:
    for dtype in ranks.run(_cast_inputs):
        still(dtype == torch.bfloat16, "pytorch/torchtitan#2881")


def _fsdp1_clips_infinity() -> tuple[str, bool]:
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    (model(torch.ones(1, 4)).sum() * float("inf")).backward()
    message = error_of(lambda: model.clip_grad_norm_(1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    return message, all(bool(one.isfinite().all()) for one in model.parameters())


def test_fsdp1_clips_infinite_gradients_without_a_word(ranks: Ranks) -> None:
    can_be_told = "error_if_nonfinite" in inspect.signature(FullyShardedDataParallel.clip_grad_norm_).parameters
    for message, finite in ranks.run(_fsdp1_clips_infinity):
        still(not message and not finite and not can_be_told, "Lightning-AI/pytorch-lightning#21928")


def _left_after_inference(policy: bool | int) -> float:
    """What of the layers' parameters a rank holds beside its shards after a forward without a backward."""
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    for layer in layers:
        fully_shard(layer, reshard_after_forward=policy)
    fully_shard(layers, reshard_after_forward=policy)
    before = _held()
    with torch.no_grad():
        for _ in range(2):
            layers(torch.ones(1, 64))
    return (_held() - before) / (4 * 64 * 64 * 4)


def test_resharded_to_a_number_a_model_stays_in_part_after_inference(ranks: Ranks) -> None:
    for left in ranks.run(_left_after_inference, 2, ranks=4):
        still(left >= 0.5, "pytorch/pytorch#147179")

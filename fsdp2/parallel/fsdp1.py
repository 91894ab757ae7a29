"""Strategy `fsdp1`: FullyShardedDataParallel, the predecessor of `fully_shard`, as a baseline.

It flattens the parameters of a unit into one tensor and shards that. Source: https://arxiv.org/abs/2304.11277

On a CPU everything but CPUOffload works: that copies through pinned memory, which needs a GPU's driver.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy, size_based_auto_wrap_policy

from fsdp2.parallel.engine import Engine, Microbatch

SHARDING = {
    "full-shard": ShardingStrategy.FULL_SHARD,  # parameters, gradients and optimizer state
    "shard-grad-op": ShardingStrategy.SHARD_GRAD_OP,  # parameters stay gathered from forward to backward
    "no-shard": ShardingStrategy.NO_SHARD,  # as DDP
    "hybrid-shard": ShardingStrategy.HYBRID_SHARD,  # over the inner dimension of a 2-D mesh
    "hybrid-shard-zero2": ShardingStrategy._HYBRID_SHARD_ZERO2,  # public by its documentation, if not by its name
}
PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "never": None}
Policy = Callable[..., bool] | CustomPolicy | None


def wrap_policy(blocks: Sequence[nn.Module], granularity: int | str, min_params: int | None) -> Policy:
    """What becomes a unit beside the root.

    Args:
        granularity: 1 for each block, as `transformer_auto_wrap_policy` does; `root` for nothing.
        min_params: not None wraps, bottom up and whatever it is, each module of so many parameters that are in no
            unit yet, as `size_based_auto_wrap_policy` does.
    """
    if min_params is not None:
        return partial(size_based_auto_wrap_policy, min_num_params=min_params)
    units = set(blocks)
    return None if granularity == "root" else CustomPolicy(lambda module: module in units)


def wrap(
    model: nn.Module,
    policy: Policy,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    precision: MixedPrecision | None,
    sharding: str,
    backward_prefetch: str,
    cpu_offload: bool,
) -> FullyShardedDataParallel:
    """Wrap what the policy names and then the root."""
    with warnings.catch_warnings():
        # Chosen on purpose, as a baseline; torch announces the deprecation of it again and again.
        warnings.simplefilter("ignore", FutureWarning)
        sharded = FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            device_mesh=mesh,  # with a mesh, sharded state dicts hold DTensors, as FSDP2's do
            device_id=device,
            mixed_precision=precision,
            sharding_strategy=SHARDING[sharding],
            backward_prefetch=PREFETCH[backward_prefetch],
            cpu_offload=CPUOffload(offload_params=cpu_offload),
            use_orig_params=True,  # keeps names and lets frozen and trained parameters share a unit
        )
        # Sharded, so that state dicts need no rank to hold the whole model.
        FullyShardedDataParallel.set_state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT)
    return sharded


def gradient_scaler(device_type: str, compute: str | None) -> torch.amp.GradScaler:
    """FSDP1's gradients are plain tensors with other values on each rank, so it needs a scaler of its own
    that reduces the overflow flag; FSDP2's DTensors carry that reduction themselves."""
    return ShardedGradScaler(device_type, enabled=compute == "fp16")


class FSDP1Engine(Engine):
    strategy = "fsdp1"

    model: FullyShardedDataParallel

    @property
    def sharding(self) -> str:
        units = len(FullyShardedDataParallel.fsdp_modules(self.model))
        return f"FullyShardedDataParallel, {units} units, {self.model.sharding_strategy.name}"

    def backward(self, loss: Tensor, last_microbatch: bool) -> None:
        if last_microbatch:
            super().backward(loss, last_microbatch)
            return
        with self.model.no_sync():
            super().backward(loss, last_microbatch)

    def forward(self, batch: Microbatch) -> Tensor:
        if batch.last:
            return super().forward(batch)
        with self.model.no_sync():
            return super().forward(batch)

    def _clip(self, norm: float | None) -> Tensor:
        # Each rank's gradients are a part of the flat ones; FSDP1's own method sums their squares over ranks.
        return self.model.clip_grad_norm_(float("inf") if norm is None else norm)

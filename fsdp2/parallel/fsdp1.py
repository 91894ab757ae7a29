"""Strategy `fsdp1`: FullyShardedDataParallel, the predecessor of `fully_shard`, as a baseline.

It flattens the parameters of a unit into one tensor and shards that. Source: https://arxiv.org/abs/2304.11277
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, StateDictType
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp2.parallel.engine import Engine, Microbatch


def wrap(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    device: torch.device,
    precision: MixedPrecision | None,
) -> FullyShardedDataParallel:
    """Wrap each block and then the root, with torch's default FULL_SHARD."""
    units = set(blocks)
    with warnings.catch_warnings():
        # Chosen on purpose, as a baseline; torch announces the deprecation of it again and again.
        warnings.simplefilter("ignore", FutureWarning)
        sharded = FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: module in units),
            device_mesh=mesh,  # with a mesh, sharded state dicts hold DTensors, as FSDP2's do
            device_id=device,
            mixed_precision=precision,
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

"""Mixed precision: the compute dtype, and the loss scaling that fp16 needs.

FSDP casts parameters when it all-gathers them, so activations are stored in the low dtype and the sharded
parameters that the optimizer updates stay fp32.

Source: https://arxiv.org/abs/1710.03740
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def fsdp2_policy(compute: str | None, reduce: str) -> MixedPrecisionPolicy:
    """The policy of `fully_shard`.

    Args:
        compute: `bf16` or `fp16`, the dtype of gathered parameters and of activations; None = that of the shards.
        reduce: a name in `DTYPES`, the dtype in which gradients are reduce-scattered.

    `reduce_dtype` is always set: torch 2.15 changed what None means, and a reduction in fp16 overflows
    where each rank's gradients alone would not.
    """
    return MixedPrecisionPolicy(param_dtype=None if compute is None else DTYPES[compute], reduce_dtype=DTYPES[reduce])


def with_statistics(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Batch norms at or below some: they average over steps in fp32, and take weights of no other dtype."""
    found = (module for outer in modules for module in outer.modules())
    return [
        module
        for module in dict.fromkeys(found)
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)) and module.affine
    ]


def gradient_scaler(device_type: str, compute: str | None) -> torch.amp.GradScaler:
    """A scaler that is enabled for fp16 alone; bf16 has fp32's range and needs none.

    fp16's smallest normal number is 6e-5, and gradients below vanish; the scaler multiplies the loss, divides
    the gradients before the step, and skips a step whose gradients overflowed. The plain scaler is right for
    sharded gradients too: with DTensors its overflow flag is reduced over the mesh, so ranks skip together.
    """
    return torch.amp.GradScaler(device_type, enabled=compute == "fp16")


def with_inputs_in(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with those of its inputs that are floating point in another dtype: for a strategy that doesn't cast."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    inputs = batch.inputs
    other = {name: cast(one) for name, one in inputs.items()} if isinstance(inputs, dict) else cast(inputs)
    return dataclasses.replace(batch, inputs=other)

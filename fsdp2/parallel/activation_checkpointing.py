"""Activation checkpointing: keep a block's input, and compute the rest again in backward.

Source: https://arxiv.org/abs/1604.06174; for single operators https://arxiv.org/abs/2205.05198
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# What `op` keeps: results that are expensive to compute and small against what surrounds them.
_aten = torch.ops.aten
EXPENSIVE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_mm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,  # what torch prefers on an H100
    _aten._scaled_dot_product_fused_attention_overrideable.default,  # of devices that bring their own, such as XPU
    torch.ops.higher_order.flex_attention,
}


def _save_expensive(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_activations(blocks: Sequence[nn.Module], mode: str) -> None:
    """Make the forward of each block recompute in backward.

    Args:
        mode: `block` keeps only the input of a block: least memory, one more forward. `op` also keeps the
            results of matrix products, convolutions and attention and recomputes the cheap rest.

    The block's `forward` is replaced, not the module: names in the state dict stay as they are, and hooks
    that are put on the block later, such as `fully_shard`'s, run outside of what is recomputed.
    """
    context = {}
    if mode == "op":
        context["context_fn"] = partial(create_selective_checkpoint_contexts, _save_expensive)
    for block in blocks:
        # setattr, because a type checker takes assigning to a method for a mistake.
        setattr(block, "forward", _recomputed(block.forward, context))  # noqa: B010


def _recomputed(forward: Callable[..., Any], context: dict[str, Any]) -> Callable[..., Any]:
    # A function with a frame of its own: torch.compile traces frames, and `partial(checkpoint, ...)` has none.
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)

    return recomputing

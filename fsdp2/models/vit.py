"""torchvision's Vision Transformer for 28×28 grey images, as in the FSDP2 tutorials of Ray Train.

Source: https://arxiv.org/abs/2010.11929
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2.models.initial import Table, fan_in_uniform, normal, ones, xavier_uniform, zeros
from fsdp2.models.names import BY_TORCH
from fsdp2.models.spec import ModelSpec

SIZES = {
    "seed": {"num_layers": 10, "num_heads": 2, "hidden_dim": 128, "mlp_dim": 128},
    "tiny": {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64},
    "small": {"num_layers": 12, "num_heads": 6, "hidden_dim": 384, "mlp_dim": 1536},
    "base": {"num_layers": 12, "num_heads": 12, "hidden_dim": 768, "mlp_dim": 3072},
}

# torchvision's own distributions, and those of nn.Conv2d and nn.Linear for `conv_proj` and `out_proj`,
# except that all biases start at zero: the bias of a layer has no fan-in that its shape would tell.
INITIAL_VALUES: Table = {
    "class_token": zeros,
    "encoder.pos_embedding": normal(0.02),
    "conv_proj.weight": fan_in_uniform,
    "*.ln_?.weight": ones,
    "encoder.ln.weight": ones,
    "*.self_attention.in_proj_weight": xavier_uniform,
    "*.self_attention.out_proj.weight": fan_in_uniform,
    "*.mlp.?.weight": xavier_uniform,
    "heads.head.weight": zeros,
    "*bias": zeros,
}


def make(num_layers: int, num_heads: int, hidden_dim: int, mlp_dim: int) -> nn.Module:
    """Images (N, 1, 28, 28) -> logits (N, 10), by patches of 7×7, of which an image has 4×4."""
    from torchvision.models import VisionTransformer  # here: it takes a second that other models need not pay

    model = VisionTransformer(
        image_size=28,
        patch_size=7,
        num_layers=num_layers,
        num_heads=num_heads,
        hidden_dim=hidden_dim,
        mlp_dim=mlp_dim,
        num_classes=10,
    )
    model.conv_proj = nn.Conv2d(1, hidden_dim, kernel_size=7, stride=7)
    return model


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The encoder's layers, in forward order."""
    return list(model.get_submodule("encoder.layers").children())


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross-entropies, 0-d fp32, of (N, classes) logits and (N,) int64 labels."""
    # In fp32 whatever the compute dtype: the sum over a batch does not fit the range of fp16.
    return F.cross_entropy(outputs.float(), targets, reduction="sum")


def splits() -> Mapping[str, Any]:
    """The split of each block's hidden numbers between ranks; a row-wise bias is added once.

    Attention is whole on each rank: `nn.MultiheadAttention` has one weight for queries, keys and values, and takes no
    part of its heads.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from fsdp2.models.locally import Locally

    block = "encoder.layers.*."
    whole = ["", "conv_proj", "encoder", "encoder.ln", "heads.head"]
    whole += [f"{block}{name}" for name in ("ln_?", "self_attention", "self_attention.out_proj")]
    split = {f"{block}mlp.0": ColwiseParallel(), f"{block}mlp.3": RowwiseParallel()}
    return {name: Locally() for name in whole} | split


def _widths(size: Mapping[str, Any], _: int) -> dict[str, int]:
    return {"mlp_dim": size["mlp_dim"]}


SPEC = ModelSpec(
    "vit", "image", SIZES, make, blocks, INITIAL_VALUES, loss, attentions=BY_TORCH, splits=splits, split_sizes=_widths
)

"""`--model timm:NAME`: an image model of the timm library, with its own initial values."""

from __future__ import annotations

import difflib
from typing import Any

import torch.nn.functional as F
from torch import nn

from fsdp2.models.names import BY_TORCH
from fsdp2.models.spec import Batch, ModelSpec
from fsdp2.models.vit import loss
from fsdp2.units import install
from fsdp2_extra.models.blocks import find_blocks

CLASSES = 10  # of each dataset of images


def spec(name: str) -> ModelSpec:
    """Raises ValueError, in one line, if timm has no such model."""
    try:
        import timm
    except ImportError:
        raise ValueError(f"timm isn't installed; {install('timm')}") from None
    if name not in timm.list_models():
        near = difflib.get_close_matches(name, timm.list_models(), 3)
        raise ValueError(f"{name}: timm has no such model" + (f"; it has {', '.join(near)}" if near else ""))

    def make() -> nn.Module:
        return timm.create_model(name, pretrained=False, in_chans=1, num_classes=CLASSES)

    def call(model: nn.Module, batch: Batch) -> Any:
        return model(F.interpolate(batch.inputs, size[1:], mode="bilinear"))

    settings = timm.get_pretrained_cfg(name)
    size = settings.input_size if settings else (3, 224, 224)
    return ModelSpec(f"timm:{name}", "image", {"own": {}}, make, find_blocks, {}, loss, call, attentions=BY_TORCH)

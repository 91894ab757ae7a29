"""Gradient clipping as FSDP1 has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    """The norm of all gradients as of one vector, over all ranks. Those of each mesh, and those that every rank has
    whole, are counted apart, since torch's functions don't take several at once. A collective call."""
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            kinds.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    if not kinds:
        return torch.zeros(())
    if len(kinds) == 1:
        (parameters,) = kinds.values()
        return _whole(nn.utils.clip_grad_norm_(parameters, max_norm, norm_type))
    norms = [_whole(get_total_norm([p.grad for p in kind if p.grad is not None], norm_type)) for kind in kinds.values()]
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    for kind in kinds.values():
        clip_grads_with_norm_(kind, max_norm, total)
    return total


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm

"""Gradient clipping as FSDP1 has it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float) -> Tensor:
    """The norm of all gradients as of one vector, over all ranks. Sharded ones and those that every rank has whole
    are counted apart, since torch's functions don't take both at once. A collective call."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    kinds = [[p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (True, False)]
    norms = [get_total_norm([p.grad for p in kind if p.grad is not None], norm_type) for kind in kinds if kind]
    if not norms:
        return torch.zeros(())
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack([norm.to(whole[0].device) for norm in whole]), norm_type)
    for kind in kinds:
        clip_grads_with_norm_(kind, max_norm, total)
    return total

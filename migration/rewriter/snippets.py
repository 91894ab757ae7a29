"""Functions that a plain program may get: `helpers.py` puts their source, without annotations, behind its imports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard


def shard_by_size(module: Any, min_num_params: int, is_root: bool = True, **options: Any) -> int:
    """Shard what FSDP1's size_based_auto_wrap_policy chose; returns how many parameters are in groups."""
    numel = sum(parameter.numel() for parameter in module.parameters())
    if numel < min_num_params or isinstance(module, torch.nn.MultiheadAttention):
        return 0
    taken = sum(shard_by_size(child, min_num_params, False, **options) for child in module.children())
    if is_root or numel - taken < min_num_params or isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        return taken
    fully_shard(module, **options)
    return numel


def local_shard(tensor: Any) -> Any:
    """This rank's part of a tensor, as FSDP1's parameters and gradients were."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def own_steps(state: Any) -> Any:
    """The state of an optimizer with a step for each parameter: FSDP1 saved one for several, which counts for all."""
    for name, values in state["state"].items():
        values.update({key: one.clone() for key, one in values.items() if torch.is_tensor(one) and not one.dim()})
        places = [one.data_ptr() for one in values.values() if torch.is_tensor(one) and one.numel() > 1]
        if len({*places}) < len(places):
            raise ValueError(f"{name}: one of its moments lies over another, as FSDP1 saves them on a CPU")
    return state


@contextlib.contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """Gradients are summed up on each rank, and not reduced, while this is open."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


@contextlib.contextmanager
def full_params(model: Any) -> Iterator[None]:
    """Whole parameters while this is open, on every rank, to be read: what is written to them is lost."""
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for group in groups:
        group.unshard()
    try:
        yield
    finally:
        for group in groups:
            group.reshard()

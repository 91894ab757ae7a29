"""Describe each parameter's sharding and dtype: looked up in the model, not in the flags, and asserted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp2.parallel.precision import with_statistics
from fsdp2.parallel.shards import groups_of, summary


def check_sharded(model: nn.Module, plain_type: type, placements: Sequence[Placement]) -> None:
    """Assert that `fully_shard` did what it says.

    The model is an FSDPModule and still an instance of its own class; each parameter is a DTensor with the
    expected placement. Raises RuntimeError that names what isn't so.
    """
    if not (isinstance(model, FSDPModule) and isinstance(model, plain_type)):
        raise RuntimeError(f"{type(model).__name__} is not both an FSDPModule and a {plain_type.__name__}")
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise RuntimeError(f"{name} is a plain {type(parameter).__name__} and not a DTensor")
        names = parameter.device_mesh.mesh_dim_names or ("",) * parameter.device_mesh.ndim
        of_fsdp: list[Any] = [one for name, one in zip(names, parameter.placements, strict=True) if name != "tp"]
        # What tensor parallelism has cut before on the same dimension is a strided shard of that dimension.
        if [Shard(one.dim) if hasattr(one, "split_factor") else one for one in of_fsdp] != list(placements):
            raise RuntimeError(f"{name} is placed {parameter.placements} and not {tuple(placements)}")


def check_dtypes(model: nn.Module, compute: torch.dtype | None) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Name -> dtype of each parameter while sharded and while gathered. A collective call.

    Raises RuntimeError if a sharded one that is trained isn't fp32, or a gathered one isn't in the compute dtype, but
    for batch norms, which compute in fp32.
    """
    sharded = {name: parameter.dtype for name, parameter in model.named_parameters()}
    groups = groups_of(model)
    for group in groups:  # the root first: it is what torch sets the whole tree up from
        group.unshard()
    gathered = {name: parameter.dtype for name, parameter in model.named_parameters()}
    for group in groups:
        group.reshard()
    norms = {id(parameter) for norm in with_statistics([model]) for parameter in norm.parameters()}
    for name, parameter in model.named_parameters():
        dtype = sharded[name]
        wanted = torch.float32 if compute is None or id(parameter) in norms else compute
        if (dtype != torch.float32 and parameter.requires_grad) or gathered[name] != wanted:
            raise RuntimeError(f"{name} is {dtype} sharded and {gathered[name]} gathered, not float32 and {wanted}")
    return {name: (dtype, gathered[name]) for name, dtype in sharded.items()}


def report(model: nn.Module, plain_type: type, *, replicas: int, compute: torch.dtype | None) -> list[str]:
    """Check everything and describe each parameter in a line. A collective call; raises RuntimeError."""
    check_sharded(model, plain_type, (Shard(0),) if replicas == 1 else (Replicate(), Shard(0)))
    dtypes = check_dtypes(model, compute)
    lines = [f"{'parameter':<52} {'global shape':<16} {'local shape':<16} {'placement':<24} sharded -> gathered"]
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole, here = str(tuple(parameter.shape)), str(tuple(parameter.to_local().shape))
        placed = ", ".join(map(repr, parameter.placements))
        low, high = (str(dtype).removeprefix("torch.") for dtype in dtypes[name])
        lines.append(f"{name:<52} {whole:<16} {here:<16} {placed:<24} {low} -> {high}")
    lines.append(f"checked: {summary(model)}; it is an FSDPModule and a {plain_type.__name__}")
    return lines

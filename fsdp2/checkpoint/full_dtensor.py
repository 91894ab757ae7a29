"""Full state dicts by the DTensor API: gather each sharded tensor, or cut each full one.

`full_dcp.py` has the same functions by the DCP API; both write the same files.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.html
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fsdp2.checkpoint.spool import spool
from fsdp2.checkpoint.state import plain_names

K = TypeVar("K")


def full_model_state(model: nn.Module, folder: Path | None = None) -> dict[str, Tensor]:
    """Name -> full CPU tensor on rank 0, {} elsewhere. A collective call.

    Args:
        folder: where rank 0 keeps the tensors, in a file without a name that they are mapped from.

    One tensor at a time is gathered: other ranks never hold more than one whole, nor does rank 0 with a folder.
    """
    return _gathered(plain_names(model), folder)


def full_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path | None = None
) -> dict[str, Any]:
    """{"state": {name: {"exp_avg": full tensor, …}}, "param_groups": […]} on rank 0, {} elsewhere.

    A collective call, with the folder of `full_model_state`. Full tensors have the shape and dtype of the parameter.
    """
    sharded: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    tensors = {(name, key): value for name, values in sharded["state"].items() for key, value in values.items()}
    full = _gathered(tensors, folder)
    if dist.get_rank() != 0:
        return {}
    state: dict[str, dict[str, Tensor]] = {name: {} for name in sharded["state"]}
    for (name, key), tensor in full.items():
        state[name][key] = tensor
    return {"state": state, "param_groups": sharded["param_groups"]}


def _gathered(sharded: Mapping[K, Tensor], folder: Path | None) -> dict[K, Tensor]:
    def gather(name: K) -> Tensor:
        value = sharded[name]
        if not isinstance(value, DTensor):
            return value.detach()
        # One dimension of the mesh after the other, the outer first: what FSDP2 has cut of what tensor parallelism had
        # cut before is joined in that order, and torch would warn that one all-gather can't do both.
        for dimension in range(value.device_mesh.ndim - 1):
            left = [Replicate()] * (dimension + 1) + list(value.placements[dimension + 1 :])
            value = value.redistribute(placements=left)
        return value.full_tensor().detach()

    if dist.get_rank() != 0:
        for name in sharded:
            gather(name)  # each gathering needs every rank
        return {}
    if folder is None:
        return {name: gather(name).cpu() for name in sharded}
    return spool(sharded, lambda name: gather(name).cpu().contiguous(), folder)


@torch.no_grad()
def load_full_model_state(model: nn.Module, path: Path) -> None:
    """Fill a sharded model from the file of `full_model_state`. A collective call.

    Rank 0 maps the file and each tensor is scattered from there; other ranks allocate one at a time to
    receive into. Raises ValueError on every rank if the file can't be read, or if names, shapes or kinds of numbers
    differ; another floating dtype is cast.
    """
    from fsdp2.checkpoint.full_file import read_same

    targets = plain_names(model)
    scatter(read_same(path, targets), targets)


@torch.no_grad()
def scatter(full: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Fill tensors, sharded or plain, from whole ones of the same names that rank 0 has. A collective call.

    Elsewhere `full` is empty.
    """
    for name, target in targets.items():
        if isinstance(target, DTensor):
            # In the dtype that the others receive into: rank 0 would send bytes that they take for other numbers.
            value = full[name].to(target.dtype) if full else torch.empty(target.shape, dtype=target.dtype)
            # Sends rank 0's shards over the mesh. Copied into the parameter rather than assigned as a new
            # one: hooks and optimizer hold on to the old. Local to local, since an offloaded shard is on the
            # CPU while its mesh is of GPUs.
            value = value.to(target.device_mesh.device_type)
            shard = distribute_tensor(value, target.device_mesh, target.placements)
            target.to_local().copy_(shard.to_local())
        else:
            # A plain tensor: a buffer, or a strategy that doesn't shard.
            if full:
                target.copy_(full[name])
            dist.broadcast(target, src=0)

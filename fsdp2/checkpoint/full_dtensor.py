"""Full state dicts by the DTensor API: gather each sharded tensor, or cut each full one.

`full_dcp.py` has the same functions by the DCP API; both write the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present


def _full_on_rank0(value: Any) -> Any:
    """A full copy on the CPU of rank 0 and None elsewhere; every rank takes part in the gathering."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if dist.get_rank() != 0:
        return None
    return value.detach().cpu() if isinstance(value, Tensor) else value


def full_model_state(model: nn.Module) -> dict[str, Tensor]:
    """Name -> full CPU tensor on rank 0, {} elsewhere. A collective call.

    One parameter at a time, so other ranks never hold more than one of them whole.
    """
    state = {name: _full_on_rank0(value) for name, value in plain_names(model).items()}
    return state if dist.get_rank() == 0 else {}


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """{"state": {name: {"exp_avg": full tensor, …}}, "param_groups": […]} on rank 0, {} elsewhere."""
    sharded: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    state = {
        name: {key: _full_on_rank0(value) for key, value in values.items()} for name, values in sharded["state"].items()
    }
    return {"state": state, "param_groups": sharded["param_groups"]} if dist.get_rank() == 0 else {}


@torch.no_grad()
def load_full_model_state(model: nn.Module, path: Path) -> None:
    """Fill a sharded model from the file of `full_model_state`. A collective call.

    Rank 0 maps the file and each tensor is scattered from there; other ranks allocate one at a time to
    receive into. Raises ValueError on every rank if names or shapes differ.
    """
    full = read_full(path) if dist.get_rank() == 0 else {}
    targets = plain_names(model)
    require_same(full, targets, path)
    for name, target in targets.items():
        if isinstance(target, DTensor):
            value = full[name] if full else torch.empty(target.shape, dtype=target.dtype)
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


def read_full(path: Path) -> dict[str, Tensor]:
    """The tensors of a full-model.pt, mapped from the file and read only when they are used; no code is run.

    Raises ValueError with the reason, in one line, if it is no such file.
    """
    try:
        state = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except Exception as error:  # torch.load fails in many ways on what isn't its file
        raise ValueError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    if not (isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())):
        raise ValueError("it holds no state dict")
    return state


def plain_names(model: nn.Module) -> dict[str, Tensor]:
    """`model.state_dict()` without DDP's prefix; sharded tensors stay sharded, and nothing is sent."""
    state = model.state_dict()
    consume_prefix_in_state_dict_if_present(state, "module.")
    return state


def differences(full: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> list[str]:
    """One line for each tensor that is in one of two state dicts only or has another shape."""
    lines = [f"{name}: only in the file" for name in full.keys() - targets.keys()]
    lines += [f"{name}: only in the model" for name in targets.keys() - full.keys()]
    lines += [
        f"{name}: {tuple(full[name].shape)} in the file, {tuple(targets[name].shape)} in the model"
        for name in full.keys() & targets.keys()
        if full[name].shape != targets[name].shape
    ]
    return sorted(lines)


def require_same(full: Mapping[str, Tensor], targets: Mapping[str, Tensor], path: Path) -> None:
    """Raise ValueError on every rank if rank 0's `full` doesn't fit. A collective call."""
    found = [differences(full, targets) if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(found, src=0)
    if found[0]:
        raise ValueError(f"{path} is of another model: {'; '.join(found[0][:20])}")

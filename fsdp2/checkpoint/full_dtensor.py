"""Full state dicts by the DTensor API: gather each sharded tensor, or cut each full one.

`full_dcp.py` has the same functions by the DCP API; both write the same files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from fsdp2.checkpoint.archive import load_archive
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.spool import spool

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
    """{"state": {name: {"exp_avg": full tensor, …}}, "param_groups": […]} on rank 0, {} elsewhere; as above."""
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
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach()

    if dist.get_rank() != 0:
        for name in sharded:
            gather(name)  # each gathering needs every rank
        return {}
    if folder is None:
        return {name: gather(name).cpu() for name in sharded}
    like = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in sharded.items()}
    return spool(like, lambda name: gather(name).cpu().contiguous(), folder)


@torch.no_grad()
def load_full_model_state(model: nn.Module, path: Path) -> None:
    """Fill a sharded model from the file of `full_model_state`. A collective call.

    Rank 0 maps the file and each tensor is scattered from there; other ranks allocate one at a time to
    receive into. Raises ValueError on every rank if the file can't be read, or if names, shapes or kinds of numbers
    differ; another floating dtype is cast.
    """
    targets = plain_names(model)
    full = read_same(path, targets)
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


def read_full(path: Path) -> dict[str, Tensor]:
    """The tensors of a full-model.pt, mapped from the file and read only when they are used; no code is run.

    Raises ValueError with the reason, in one line, if it is no such file.
    """
    try:
        state = load_archive(path)
    except OSError as error:
        raise ValueError(str(error)) from error
    except Refused as error:
        raise ValueError(f"it {error}") from None
    if not (isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())):
        raise ValueError("it holds no state dict")
    return state


def plain_names(model: nn.Module) -> dict[str, Tensor]:
    """`model.state_dict()` without DDP's prefix; sharded tensors stay sharded, and nothing is sent."""
    state = model.state_dict()
    consume_prefix_in_state_dict_if_present(state, "module.")
    return state


def differences(full: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> list[str]:
    """One line for each tensor that is in one of two state dicts only, or whose shape or kind of numbers differs."""
    lines = [f"{name}: only in the file" for name in full.keys() - targets.keys()]
    lines += [f"{name}: only in the model" for name in targets.keys() - full.keys()]
    for name in full.keys() & targets.keys():
        there, here = full[name], targets[name]
        if there.shape != here.shape:
            lines.append(f"{name}: {tuple(there.shape)} in the file, {tuple(here.shape)} in the model")
        elif there.dtype != here.dtype and not (there.is_floating_point() and here.is_floating_point()):
            # Integers would be rounded or, as weights, are quantized: a cast makes other numbers of both.
            lines.append(f"{name}: {there.dtype} in the file, {here.dtype} in the model")
    return sorted(lines)


def read_same(path: Path, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file that fit the targets, on rank 0, and {} elsewhere. A collective call.

    A floating dtype may be another one than its target's. Raises ValueError on every rank if the file can't be read or
    doesn't fit.
    """
    full: dict[str, Tensor] = {}
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            full = read_full(path)
            if found := differences(full, targets):
                problem = [f"{path} is of another model: {'; '.join(found[:20])}"]
        except (OSError, ValueError) as error:
            problem = [f"{path} can't be read: {error}"]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise ValueError(problem[0])
    return full

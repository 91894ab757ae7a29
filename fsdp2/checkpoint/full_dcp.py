"""Full state dicts by the DCP API: torch gathers, offloads and broadcasts.

`full_dtensor.py` has the same functions by the DTensor API; both write the same files.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

from fsdp2.checkpoint.full_file import read_same
from fsdp2.checkpoint.spool import spool

# Gathered tensors are moved to the CPU one by one and kept on rank 0 alone.
_GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SCATTER = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)


def full_model_state(model: nn.Module, folder: Path | None = None) -> dict[str, Tensor]:
    """Name -> full CPU tensor on rank 0, {} elsewhere. A collective call.

    Args:
        folder: where rank 0 keeps the tensors, in a file without a name that they are mapped from. Before that
            torch has all of them in rank 0's memory.
    """
    state: dict[str, Any] = get_model_state_dict(model, options=_GATHER)
    if dist.get_rank() != 0:
        return {}
    return dict(state) if folder is None else _on_disk(dict(state), folder)


def full_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path | None = None
) -> dict[str, Any]:
    """{"state": {name: {"exp_avg": full tensor, …}}, "param_groups": […]} on rank 0, {} elsewhere.

    A collective call, with the folder of `full_model_state`. Full tensors have the shape and dtype of the parameter.
    """
    state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=_GATHER))
    if dist.get_rank() != 0:
        return {}
    if folder is not None:
        for name in state["state"]:
            state["state"][name] = _on_disk(dict(state["state"][name]), folder)
    return state


def _on_disk(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    like = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in tensors.items()}
    return spool(like, lambda name: tensors.pop(name).contiguous(), folder)


def load_full_model_state(model: nn.Module, path: Path) -> None:
    """Fill a sharded model from the file of `full_model_state`. A collective call.

    Rank 0 maps the file; torch broadcasts each tensor from there, and other ranks keep their shards. Raises
    ValueError on every rank if the file can't be read, or if names, shapes or kinds of numbers differ; another floating
    dtype is cast, for which rank 0 holds the whole model.
    """
    targets: dict[str, Any] = get_model_state_dict(model)
    full = read_same(path, targets)
    # In the dtype that the others receive into: torch would make the parameters of each rank what that rank believes.
    cast: dict[str, Any] = {name: value.to(targets[name].dtype) for name, value in full.items()}
    set_model_state_dict(model, cast, options=_SCATTER)

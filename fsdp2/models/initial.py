"""Initial values: a function of the seed, the parameter's name and its shape alone.

`fully_shard` has no `sync_module_states`, and drawing on a sharded parameter lets every rank draw the same
local numbers, so that the logical weight repeats its shard. Here each full tensor is drawn on the CPU from
a generator keyed by (seed, name), and a rank keeps its shard of it: 1, 2, 3 or 8 ranks and every strategy
start from the same model, and no rank waits for another.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

Fill = Callable[[Tensor, torch.Generator], object]
Table = Mapping[str, Fill]
"""Name pattern -> how to fill a full tensor in place; the first pattern that matches a name counts."""


def zeros(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.zero_()


def ones(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.fill_(1)


def normal(std: float) -> Fill:
    return lambda tensor, generator: tensor.normal_(0.0, std, generator=generator)


def xavier_uniform(tensor: Tensor, generator: torch.Generator) -> None:
    nn.init.xavier_uniform_(tensor, generator=generator)


def fan_in_uniform(tensor: Tensor, generator: torch.Generator) -> None:
    """U(-1/sqrt(fan in), 1/sqrt(fan in)): what nn.Linear and nn.Conv2d draw their weights from."""
    nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)


def fill_for(table: Table, name: str) -> Fill:
    """Raises KeyError if the table says nothing about `name`."""
    for pattern, fill in table.items():
        if fnmatchcase(name, pattern):
            return fill
    raise KeyError(f"{name} has no entry in the model's table of initial values")


def full_value(table: Table, name: str, shape: torch.Size, dtype: torch.dtype, seed: int) -> Tensor:
    """The full initial tensor of one parameter or buffer, on the CPU.

    Raises KeyError if the table says nothing about `name`.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    full = torch.empty(shape, dtype=dtype, device="cpu")
    fill_for(table, name)(full, generator)
    return full


def reset_parameters(model: nn.Module, table: Table, seed: int) -> None:
    """Set every parameter and every buffer, non-persistent ones included, to its initial value.

    Works on plain tensors and on DTensors of any placement; issues no collective. This is the
    `reset_parameters` of the path meta -> fully_shard -> to_empty -> reset_parameters.

    Raises KeyError if the table says nothing about one of them.
    """
    with torch.no_grad():
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            full = full_value(table, name, tensor.shape, tensor.dtype, seed)
            if isinstance(tensor, DTensor):
                # src_data_rank=None: every rank has the full value already, so nothing is sent.
                shard = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
                tensor.to_local().copy_(shard.to_local())
            else:
                tensor.copy_(full)

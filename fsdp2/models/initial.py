"""Initial values: a function of the seed, the parameter's name and its shape alone.

`fully_shard` has no `sync_module_states`, and drawing on a sharded parameter lets every rank draw the same
local numbers, so that the logical weight repeats its shard. Here the elements of a tensor, in the order of
its memory, are drawn in blocks of a fixed size, each from a generator keyed by (seed, name, number of the
block), and a rank draws the blocks that its shard lies in: 1, 2, 3 or 8 ranks and every strategy start from
the same model, and no rank waits for another or draws what it does not hold.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

Fill = Callable[[Tensor, torch.Size, torch.Generator], object]
"""(block, shape, generator): fill a block, (n,), of a tensor that has this shape."""

Table = Mapping[str, Fill]
"""Name pattern -> how a tensor is filled; the first pattern that matches a name counts."""

# Elements. What a block has beside a rank's shard is drawn for nothing; smaller ones cost more generators.
BLOCK = 1 << 16


def zeros(block: Tensor, shape: torch.Size, generator: torch.Generator) -> None:
    """Fill a block with zeros; nothing is drawn."""
    block.zero_()


def ones(block: Tensor, shape: torch.Size, generator: torch.Generator) -> None:
    """Fill a block with ones; nothing is drawn."""
    block.fill_(1)


def normal(std: float) -> Fill:
    """Draw from a normal distribution of mean 0 and this standard deviation."""
    return lambda block, shape, generator: block.normal_(0.0, std, generator=generator)


def xavier_uniform(block: Tensor, shape: torch.Size, generator: torch.Generator) -> None:
    """As `nn.init.xavier_uniform_`: U(-a, a) with a = sqrt(6 / (fan in + fan out)), of `shape`.

    Source: https://proceedings.mlr.press/v9/glorot10a.html
    """
    field = shape[2:].numel()
    bound = math.sqrt(3.0) * math.sqrt(2.0 / float((shape[0] + shape[1]) * field))
    block.uniform_(-bound, bound, generator=generator)


def fan_in_uniform(block: Tensor, shape: torch.Size, generator: torch.Generator) -> None:
    """U(-1/sqrt(fan in), 1/sqrt(fan in)), of `shape`: what nn.Linear and nn.Conv2d draw their weights from."""
    bound = 1 / math.sqrt(shape[1:].numel())
    block.uniform_(-bound, bound, generator=generator)


def fill_for(table: Table, name: str) -> Fill:
    """Raises KeyError if the table says nothing about `name`."""
    for pattern, fill in table.items():
        if fnmatchcase(name, pattern):
            return fill
    raise KeyError(f"{name} has no entry in the model's table of initial values")


def rows_of(fill: Fill, name: str, shape: torch.Size, dtype: torch.dtype, seed: int, rows: slice) -> Tensor:
    """Some rows of a tensor's initial value, on the CPU; all of one that has no dimensions.

    Args:
        shape: of the whole tensor.
        rows: a range of its first dimension, from 0 <= start <= stop.
    """
    wide = shape[1:].numel()
    start, stop = (rows.start * wide, rows.stop * wide) if shape else (0, 1)
    drawn = torch.empty(stop - start, dtype=dtype)
    for number in range(start // BLOCK, -(-stop // BLOCK) if stop > start else 0):
        first = number * BLOCK
        # Always a whole block: part of one would be other numbers.
        block = torch.empty(min(BLOCK, shape.numel() - first), dtype=dtype)
        key = f"{seed}/{name}" + (f"/{number}" if number else "")
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big"))
        fill(block, shape, generator)
        low, high = max(start, first), min(stop, first + len(block))
        drawn[low - start : high - start] = block[low - first : high - first]
    return drawn.view(rows.stop - rows.start, *shape[1:]) if shape else drawn.view(())


def place_of(tensor: Tensor) -> tuple[slice, ...]:
    """Which range of each dimension of the whole tensor this rank holds.

    Raises ValueError for a DTensor whose shard is no such box.
    """
    place = [slice(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return tuple(place)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the mesh of its own tensor"
    for dimension, placement in enumerate(tensor.placements):
        # Also for a strided shard, which is a kind of Shard: its rows are not neighbours.
        if type(placement) not in (Shard, Replicate):
            raise ValueError(
                f"a tensor is placed {placement!r}: a rank's part of it is no range of rows, and can't be drawn alone; "
                "give it its initial value before it is placed so"
            )
        if isinstance(placement, Shard):
            # As torch.chunk cuts it: the last ranks have less, or nothing.
            whole = place[placement.dim]
            size = -(-(whole.stop - whole.start) // tensor.device_mesh.size(dimension))
            start = min(whole.start + size * coordinate[dimension], whole.stop)
            place[placement.dim] = slice(start, min(start + size, whole.stop))
    return tuple(place)


def nothing(name: str) -> bool:
    """The default of `brought`: no tensor of this name comes from elsewhere."""
    return False


def reset_parameters(model: nn.Module, table: Table, seed: int, *, brought: Callable[[str], bool] = nothing) -> None:
    """Set every parameter and every buffer, non-persistent ones included, to its initial value.

    Works on plain tensors and on sharded DTensors; issues no collective. This is the `reset_parameters` of the
    path meta -> fully_shard -> to_empty -> reset_parameters.

    Args:
        brought: whether something else brings what has this name in the state dict: a checkpoint, or a file.

    Raises KeyError if the table says nothing about one of them.
    """
    left_out = {name for name in model.state_dict() if brought(name)}
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if name not in left_out:
            draw(tensor, name, fill_for(table, name), seed)


@torch.no_grad()
def draw(tensor: Tensor, name: str, fill: Fill, seed: int) -> None:
    """Set this rank's part of one tensor, its shard or all of it, to its initial value."""
    rows, *others = place_of(tensor) or (slice(0, 1),)
    mine = rows_of(fill, name, tensor.shape, tensor.dtype, seed, rows)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local.copy_(mine[:, *others] if others else mine)

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
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

Fill = Callable[[Tensor, torch.Size, torch.Generator], object]
"""(block, shape, generator): fill a block, (n,), of a tensor that has this shape."""

Table = Mapping[str, Fill]
"""Name pattern -> how a tensor is filled; the first pattern that matches a name counts."""

# Elements. What a block has beside a rank's shard is drawn for nothing; smaller ones cost more generators.
BLOCK = 1 << 16

# Elements that a thread draws before it copies them, 4 MiB of fp32; rows that are longer come one by one.
PART = 16 * BLOCK


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
    """U(-a, a) with a = sqrt(6 / (fan in + fan out)), of `shape`, like `nn.init.xavier_uniform_`.

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


def rows_of(
    fill: Fill,
    name: str,
    shape: torch.Size,
    dtype: torch.dtype,
    seed: int,
    rows: slice,
    *,
    memory: Callable[[int, torch.dtype], Tensor] | None = None,
) -> Tensor:
    """Some rows of a tensor's initial value, on the CPU; all of one that has no dimensions.

    Args:
        shape: of the whole tensor.
        rows: a range of its first dimension, from 0 <= start <= stop.
        memory: (elements, dtype) -> a tensor of so many, (n,), in which the rows are drawn; None = a new one.
    """
    wide = shape[1:].numel()
    start, stop = (rows.start * wide, rows.stop * wide) if shape else (0, 1)
    drawn = torch.empty(stop - start, dtype=dtype) if memory is None else memory(stop - start, dtype)
    for number in range(start // BLOCK, -(-stop // BLOCK) if stop > start else 0):
        first = number * BLOCK
        last = min(first + BLOCK, shape.numel())
        low, high = max(start, first), min(stop, last)
        mine = drawn[low - start : high - start]
        # Always a whole block: part of one would be other numbers.
        block = mine if len(mine) == last - first else torch.empty(last - first, dtype=dtype)
        key = f"{seed}/{name}" + (f"/{number}" if number else "")
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big"))
        fill(block, shape, generator)
        if block is not mine:
            mine.copy_(block[low - first : high - first])
    return drawn.view(rows.stop - rows.start, *shape[1:]) if shape else drawn.view(())


def slices_of(tensor: Tensor) -> tuple[slice, ...]:
    """The range of each dimension of the whole tensor that this rank holds.

    Raises ValueError for a DTensor whose shard is no such box.
    """
    slices = [slice(0, size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return tuple(slices)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the mesh of its own tensor"
    # FSDP2 cuts what tensor parallelism has cut before, on an inner dimension of the mesh: torch calls that a strided
    # shard. Cut in the order in which it happened, a rank's rows are neighbours.
    cuts = sorted(enumerate(tensor.placements), key=lambda cut: _cut_before(tensor, cut[0]))
    for dimension, placement in cuts:
        if type(placement) not in (Shard, Replicate) and not _cut_before(tensor, dimension):
            raise ValueError(
                f"a tensor is placed {placement!r}: a rank's part of it is no range of rows, and can't be drawn alone; "
                "give it its initial value before it is placed so"
            )
        if not isinstance(placement, Replicate):
            # As torch.chunk cuts it: the last ranks have less, or nothing.
            placement = cast(Shard, placement)
            whole = slices[placement.dim]
            size = -(-(whole.stop - whole.start) // tensor.device_mesh.size(dimension))
            start = min(whole.start + size * coordinate[dimension], whole.stop)
            slices[placement.dim] = slice(start, min(start + size, whole.stop))
    return tuple(slices)


def _cut_before(tensor: DTensor, dimension: int) -> bool:
    """Return whether a dimension of a mesh cuts the shards that the inner ones have made of a tensor."""
    strided: Any = tensor.placements[dimension]
    if not hasattr(strided, "split_factor"):
        return False
    sizes = enumerate(tensor.device_mesh.shape)
    inner = [size for number, size in sizes if number > dimension and tensor.placements[number] == Shard(strided.dim)]
    return bool(strided.split_factor == math.prod(inner))


def reset_parameters(
    model: nn.Module,
    table: Table,
    seed: int,
    *,
    brought: Callable[[str], bool] = lambda name: False,
    buffers: bool = True,
) -> None:
    """Set every parameter and every buffer, non-persistent ones included, to its initial value.

    Works on plain tensors and on sharded DTensors; issues no collective. This is the `reset_parameters` of the
    path meta -> fully_shard -> to_empty -> reset_parameters.

    Args:
        brought: whether something else brings what has this name in the state dict: a checkpoint, or a file.
        buffers: False leaves them as the model's code has made them, see `meta.parameters_on_meta`.

    Raises KeyError if the table says nothing about one of them.
    """
    left_out = {name for name in model.state_dict() if brought(name)}
    named = itertools.chain(model.named_parameters(), model.named_buffers() if buffers else ())
    draw(((name, tensor, fill_for(table, name)) for name, tensor in named if name not in left_out), seed)


@dataclass(frozen=True)
class Part:
    """Some rows of a tensor that one thread draws.

    Attributes:
        target: this rank's part of the tensor, on any device.
        shape: of the whole tensor.
        rows: of the whole tensor, which are drawn.
        first: the row of the whole tensor with which `target` begins.
        others: this rank's range of each further dimension.
    """

    target: Tensor
    name: str
    fill: Fill
    shape: torch.Size
    rows: slice
    first: int
    others: tuple[slice, ...]

    @torch.no_grad()  # for the thread that calls it, and no other
    def draw(self, seed: int, memory: Callable[[int, torch.dtype], Tensor]) -> None:
        """Draw the rows in `memory`, and copy to the target what of them is this rank's."""
        drawn = rows_of(self.fill, self.name, self.shape, self.target.dtype, seed, self.rows, memory=memory)
        part = self.target[self.rows.start - self.first : self.rows.stop - self.first] if self.shape else self.target
        part.copy_(drawn[:, *self.others] if self.others else drawn)


def parts_of(name: str, tensor: Tensor, fill: Fill) -> Iterator[Part]:
    """This rank's part of a tensor, its shard or all of it, in pieces of about `PART` elements."""
    rows, *others = slices_of(tensor) or (slice(0, 1),)
    target = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    step = max(1, PART // max(1, tensor.shape[1:].numel()))
    for start in range(rows.start, rows.stop, step):
        piece = slice(start, min(start + step, rows.stop))
        yield Part(target, name, fill, tensor.shape, piece, rows.start, tuple(others))


def draw(tensors: Iterable[tuple[str, Tensor, Fill]], seed: int) -> None:
    """Set this rank's part of each tensor, of any shape, to its initial value, on all threads that torch computes with.

    Beside the tensors, a thread holds `PART` elements, or a row where that is longer.
    """
    parts = [part for name, tensor, fill in tensors for part in parts_of(name, tensor, fill)]
    own, threads = threading.local(), torch.get_num_threads()

    def memory(elements: int, dtype: torch.dtype) -> Tensor:
        # Kept, since the pages of new memory cost more than what is drawn in them.
        kept: Tensor | None = getattr(own, "memory", None)
        if kept is None or kept.dtype != dtype or len(kept) < elements:
            own.memory = kept = torch.empty(elements, dtype=dtype)
        return kept[:elements]

    # A mode of torch's, such as that of fake tensors, is the mode of one thread.
    if threads == 1 or len(parts) < 2 or any(type(part.target) is not Tensor for part in parts):
        for part in parts:
            part.draw(seed, memory)
        return

    def begin() -> None:
        device = parts[0].target.device
        if device.type == "cuda":  # a thread begins on the first GPU, where other ranks may be
            torch.cuda.set_device(device)

    torch.set_num_threads(1)  # for each thread of the pool, which would else start as many for a copy
    try:
        with ThreadPoolExecutor(min(threads, len(parts)), "initial-values", begin) as pool:
            for _ in pool.map(lambda part: part.draw(seed, memory), parts):
                pass
    finally:
        torch.set_num_threads(threads)

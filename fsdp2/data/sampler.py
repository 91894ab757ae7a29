"""One order for all ranks: which samples make up each step, and which of them are this rank's.

The order of an epoch is a permutation drawn from (seed, epoch) alone. A global batch is the next slice of
it, whatever the world size; ranks and microbatches divide that slice. So the same samples are in the same
step on 1, 2 or 8 ranks, none twice and none dropped: the last global batch of an epoch may be short.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def epoch_order(size: int, seed: int, epoch: int) -> Tensor:
    """The permutation of 0 … size-1 that epoch `epoch` (from 0) is read in; (size,), int32 where that is enough.

    torch draws the same permutation in both dtypes.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(size, generator=generator, dtype=torch.int32 if size < 2**31 else torch.int64)


def global_batches(order: Tensor, global_batch: int, position: int = 0) -> Iterator[Tensor]:
    """Slices of `order`, (size,), from sample `position` on: (global_batch,) each, and the last may be shorter."""
    for start in range(position, len(order), global_batch):
        yield order[start : start + global_batch]


def microbatches(batch: Tensor, rank: int, world_size: int, accumulation: int) -> list[Tensor]:
    """This rank's `accumulation` parts, (n,) each, of a global batch, (samples,); uneven where it doesn't divide.

    With `tensor_split` for both, one process that accumulates over 2 microbatches computes on the same
    halves as 2 ranks, which is what makes their losses comparable bit for bit.
    """
    mine = batch.tensor_split(world_size)[rank]
    return list(mine.tensor_split(accumulation))


def microbatch_sizes(samples: int, rank: int, world_size: int, accumulation: int) -> list[int]:
    """The number of samples in each part that `microbatches` makes of a global batch of so many."""

    def part(whole: int, parts: int, index: int) -> int:
        return whole // parts + (index < whole % parts)

    mine = part(samples, world_size, rank)
    return [part(mine, accumulation, index) for index in range(accumulation)]

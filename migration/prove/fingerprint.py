"""Tensors as a few numbers that can be added up over their shards, so that no rank has to gather anything.

The hash of a tensor is the sum, modulo 2^64, of a hash of each element's bits and place. Its sketch is sixteen sums,
each of about a sixteenth of its elements, under random signs (Charikar, Chen and Farach-Colton, 2002). It is linear, so
the distance of two tensors is about that of their sketches. Both are the same however the tensor is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SUMS = 16
CHUNK = 1 << 20  # elements at a time
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Print:
    """Of a tensor or of a part of one: hash, sum of squares and sketch."""

    hash: int
    square: float
    sketch: list[float]

    @property
    def norm(self) -> float:
        return math.sqrt(self.square)

    def __add__(self, other: Print) -> Print:
        sketch = [a + b for a, b in zip(self.sketch, other.sketch, strict=True)]
        return Print((self.hash + other.hash) % 2**64, self.square + other.square, sketch)

    def distance(self, other: Print, factor: float = 1.0) -> float:
        """About the norm of `self - factor * other`; 0 if they are bit-equal, infinite where NaN is among them."""
        if self.hash == other.hash and factor == 1.0:
            return 0.0
        pairs = zip(self.sketch, other.sketch, strict=True)
        off = math.sqrt(sum((a - factor * b) ** 2 for a, b in pairs))
        return math.inf if math.isnan(off) else off


NOTHING = Print(0, 0.0, [0.0] * SUMS)


def total(prints: Iterable[Print]) -> Print:
    return sum(prints, NOTHING)


def _mixed(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), on int64."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(BITS[values.element_size()]).long()


def of(values: Tensor, index: Tensor) -> Print:
    """Of flat values, each at its place in the whole tensor. Any real dtype."""
    found = NOTHING
    for part, at in zip(values.split(CHUNK), index.split(CHUNK), strict=True):
        place = _mixed(at)
        numbers = part.double()
        digest = int(_mixed(_bits(part) + place).sum()) % 2**64
        sums = torch.bincount(place & (SUMS - 1), numbers * ((place >> 8 & 1) * 2 - 1), SUMS)
        found = found + Print(digest, float(numbers @ numbers), sums.tolist())
    return found


def rows(batch: Any, *, trimmed: bool = False) -> list[int]:
    """A hash of each sample of a batch: of its tensors that have a first dimension of one length, the first's.

    A tensor that needs a gradient is no data, but comes from another part of a model. `trimmed`: without the equal
    values at the end of each sample, so that a sample with padding is, trimmed, what it is without.
    """
    tensors = [one for one in _tensors(batch) if one.dim() and not one.requires_grad]
    if not tensors:
        return []
    count = tensors[0].shape[0]
    found = torch.zeros(count, dtype=torch.int64)
    for tensor in tensors:
        if tensor.shape[0] == count and tensor.numel():
            values = _bits(torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(count, -1).cpu()
            mixed = _mixed(values + _mixed(torch.arange(values.shape[1])))
            if trimmed:
                last = (values != values[:, -1:]).long() * torch.arange(1, values.shape[1] + 1)
                mixed *= torch.arange(values.shape[1]) < last.amax(1, keepdim=True)
            found = _mixed(found + mixed.sum(1))
    return [value % 2**64 for value in found.tolist()]


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree.detach() if not tree.requires_grad else tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)

"""The two kinds of data in memory: images with labels, and a row of tokens cut into windows."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

# As a target: there is nothing to predict. torch's losses leave it out by default.
IGNORED = -100

Pair = tuple[Tensor, Tensor]
Rows = Sequence[int] | numpy.ndarray


def identity_of(content: bytes | memoryview) -> str:
    """16 hexadecimal digits of a SHA-256, by which data and tokenizers are known again."""
    return hashlib.sha256(content).hexdigest()[:16]


def _identity(tensor: Tensor) -> str:
    return identity_of(tensor.flatten().numpy().data)


class Split(Protocol):
    """Samples by number.

    Attributes:
        targets_per_sample: how many of a sample's targets aren't `IGNORED`. A split whose samples differ has
            `target_count(rows)` too, how many all of these have.
    """

    @property
    def targets_per_sample(self) -> int:
        """Targets that a sample has at most: 1 for an image, the sequence length for language."""

    @property
    def content(self) -> str:
        """Another one for other samples: ranks, and the run that a checkpoint is of, must have the same."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Any, Tensor]: ...

    def __getitems__(self, indices: Rows) -> tuple[Any, Tensor]:
        """A batch: inputs, which are a tensor or tensors by the names of a model's arguments, and targets."""


class InBatches(TorchDataset[tuple[Any, Tensor]]):
    """A split that is read in batches, so that an item is what a batch of one holds."""

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        inputs, targets = self.__getitems__([index])
        one = {name: tensor[0] for name, tensor in inputs.items()} if isinstance(inputs, dict) else inputs[0]
        return one, targets[0]

    @abstractmethod
    def __getitems__(self, indices: Rows) -> tuple[Any, Tensor]: ...


class Images(InBatches):
    """Grey images and their labels.

    Args:
        pixels: (N, 28, 28), any dtype, from 0 to `white`.
        labels: (N,), int64.
        mean, std: of the pixels after they were scaled to 0–1, as torchvision's Normalize takes them.

    An item is `(1, 28, 28)` float32 and a 0-d label; a list of indices gives a batch of them at once,
    which torch's DataLoader asks for and which is many times faster than stacking single items.
    """

    targets_per_sample = 1

    def __init__(self, pixels: Tensor, labels: Tensor, *, white: float, mean: float, std: float) -> None:
        assert pixels.shape == (len(labels), 28, 28)
        self.pixels, self.labels = pixels, labels
        self.white, self.mean, self.std = white, mean, std

    @cached_property
    def content(self) -> str:
        return identity_of(f"{_identity(self.pixels)} {_identity(self.labels)}".encode())

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitems__(self, indices: Rows) -> Pair:
        # The same operations in the same order as ToTensor and Normalize, so that the result is bit-equal.
        rows = torch.as_tensor(indices)
        picked = self.pixels[rows].to(torch.float32).div(self.white)
        return picked.sub(self.mean).div(self.std).unsqueeze(1), self.labels[rows]


class Windows(InBatches):
    """A row of tokens cut into windows of `seq_len`; the target of each token is the next one.

    Args:
        tokens: (T,), an integer dtype. Windows do not overlap; what is left over at the end is not used.

    An item is a pair of (seq_len,) int64; a list of indices gives a batch of them.
    """

    def __init__(self, tokens: Tensor, seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len
        self.targets_per_sample = seq_len

    @cached_property
    def content(self) -> str:
        return _identity(self.tokens)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitems__(self, indices: Rows) -> Pair:
        starts = torch.as_tensor(indices).to(torch.int64) * self.seq_len
        windows = self.tokens[starts[:, None] + torch.arange(self.seq_len + 1)].to(torch.int64)
        return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True)
class Dataset:
    """Train and test split, and how to name a class (a label's name, or a token's text).

    Attributes:
        about: of text that was prepared, its counts and its tokenizer, which `fsdp2_extra.text.header_lines` tells of.
        facts: for a run's first record.
    """

    train: Split
    test: Split
    classes: Sequence[str]
    about: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

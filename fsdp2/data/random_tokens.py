"""Random tokens: there is nothing to learn, but any vocabulary and length, for measuring speed and memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2.data.splits import Dataset, Windows

TRAIN, TEST = 1024, 128


class _Numbers(Sequence[str]):
    """Names 0, 1, 2, … of a vocabulary, without a list of them all."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index):
        return str(range(self.size)[index])


def load(seq_len: int, vocab_size: int) -> Dataset:
    """1,024 and 128 windows of uniform tokens, int64 from 0 to vocab_size - 1, the same in every process."""
    generator = torch.Generator().manual_seed(0)

    def split(windows: int) -> Windows:
        return Windows(torch.randint(vocab_size, (windows * seq_len + 1,), generator=generator), seq_len)

    return Dataset(split(TRAIN), split(TEST), _Numbers(vocab_size))

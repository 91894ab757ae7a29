"""Handwritten digits (1,797 real ones, 8×8) in a file of this package: no download. Its source is in digits.LICENSE."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy
import torch

from fsdp2.data.splits import Dataset, Images

TEST = 360
# Of the enlarged images after scaling to 0–1.
MEAN, STD = 0.2243, 0.3494


@cache
def table() -> tuple[torch.Tensor, torch.Tensor]:
    """(1797, 8, 8) fp32 from 0 to 16, and (1797,) int64: what `sklearn.datasets.load_digits` gives."""
    with numpy.load(Path(__file__).with_name("digits.npz")) as file:
        return torch.from_numpy(file["images"]).float(), torch.from_numpy(file["labels"]).long()


def load() -> Dataset:
    """1,437 training and 360 test images: items of `Images`, (1, 28, 28) fp32 and an int64 label from 0 to 9.

    Each pixel is repeated 3×3 and the edge padded by 2: 8 x 3 + 4 = 28. It keeps pixel edges on a regular
    grid; interpolation to 28 costs 5–15 points of accuracy with the 7×7 patches of the ViT.
    """
    small, labels = table()
    pixels = torch.nn.functional.pad(small.repeat_interleave(3, dim=1).repeat_interleave(3, dim=2), (2, 2, 2, 2))

    # The file is ordered by writer, so a split without shuffling would test on writers never seen. The
    # order is fixed: it belongs to the dataset and does not change with --seed.
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    train, test = order[TEST:], order[:TEST]

    def split(rows: torch.Tensor) -> Images:
        return Images(pixels[rows], labels[rows], white=16.0, mean=MEAN, std=STD)

    return Dataset(split(train), split(test), [str(digit) for digit in range(10)])

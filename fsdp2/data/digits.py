"""scikit-learn's handwritten digits (1,797 real ones, 8×8, part of the package: no download).

Source: https://archive.ics.uci.edu/dataset/80 through `sklearn.datasets.load_digits`.
"""

from __future__ import annotations

import torch

from fsdp2.data.splits import Dataset, Images

TEST = 360
# Of the enlarged images after scaling to 0–1.
MEAN, STD = 0.2243, 0.3494


def load() -> Dataset:
    """1,437 training and 360 test images of 1×28×28.

    Each pixel is repeated 3×3 and the edge padded by 2: 8 x 3 + 4 = 28. It keeps pixel edges on a regular
    grid; interpolation to 28 costs 5–15 points of accuracy with the 7×7 patches of the ViT.
    """
    from sklearn.datasets import (
        load_digits,
    )  # here: it takes a second or two that other datasets need not pay

    raw = load_digits()
    pixels = torch.as_tensor(raw.images, dtype=torch.float32)
    pixels = pixels.repeat_interleave(3, dim=1).repeat_interleave(3, dim=2)
    pixels = torch.nn.functional.pad(pixels, (2, 2, 2, 2))
    labels = torch.as_tensor(raw.target, dtype=torch.int64)

    # The file is ordered by writer, so a split without shuffling would test on writers never seen. The
    # order is fixed: it belongs to the dataset and does not change with --seed.
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    train, test = order[TEST:], order[:TEST]

    def split(rows: torch.Tensor) -> Images:
        return Images(pixels[rows], labels[rows], white=16.0, mean=MEAN, std=STD)

    return Dataset(split(train), split(test), [str(digit) for digit in range(10)])

"""scikit-learn's handwritten digits (1,797 real ones, 8×8, part of the package: no download).

Source: https://archive.ics.uci.edu/dataset/80 through `sklearn.datasets.load_digits`.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy
import torch

from fsdp2.data.splits import Dataset, Images

TEST = 360
# Of the enlarged images after scaling to 0–1.
MEAN, STD = 0.2243, 0.3494


@cache
def table() -> torch.Tensor:
    """The table that `load_digits` reads: to read it ourselves spares each process the import of scikit-learn, which
    takes as long as that of torch. It is no public name of theirs, so a test compares both."""
    spec = find_spec("sklearn")
    assert spec is not None  # a dependency of this package
    assert spec.origin is not None
    file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return torch.from_numpy(numpy.loadtxt(file, delimiter=",", dtype=numpy.float32))


def load() -> Dataset:
    """1,437 training and 360 test images: items of `Images`, (1, 28, 28) fp32 and an int64 label from 0 to 9.

    Each pixel is repeated 3×3 and the edge padded by 2: 8 x 3 + 4 = 28. It keeps pixel edges on a regular
    grid; interpolation to 28 costs 5–15 points of accuracy with the 7×7 patches of the ViT.
    """
    small, labels = table()[:, :-1].reshape(-1, 8, 8), table()[:, -1].to(torch.int64)
    pixels = torch.nn.functional.pad(small.repeat_interleave(3, dim=1).repeat_interleave(3, dim=2), (2, 2, 2, 2))

    # The file is ordered by writer, so a split without shuffling would test on writers never seen. The
    # order is fixed: it belongs to the dataset and does not change with --seed.
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    train, test = order[TEST:], order[:TEST]

    def split(rows: torch.Tensor) -> Images:
        return Images(pixels[rows], labels[rows], white=16.0, mean=MEAN, std=STD)

    return Dataset(split(train), split(test), [str(digit) for digit in range(10)])

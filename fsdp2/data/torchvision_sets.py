"""MNIST and Fashion-MNIST through torchvision, from a folder or downloaded into a cache."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from fsdp2.data.splits import Dataset, Images

# Mean and standard deviation as the tutorials normalise them: 0.5 for Fashion-MNIST, the measured
# values for MNIST.
NORMALISE = {"fashion-mnist": (0.5, 0.5), "mnist": (0.1307, 0.3081)}
FOLDERS = {"fashion-mnist": "FashionMNIST", "mnist": "MNIST"}
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/fsdp2`, else `~/.cache/fsdp2`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdp2"


def missing_files(name: str, root: Path) -> list[str]:
    folder = root / FOLDERS[name] / "raw"
    return [str(folder / file) for file in FILES if not (folder / file).is_file()]


def _class_of(name: str) -> Any:
    from torchvision import datasets

    return {"fashion-mnist": datasets.FashionMNIST, "mnist": datasets.MNIST}[name]


def download(name: str, root: Path) -> None:
    """Download into a folder beside `root` and rename it, so that a broken download is never taken for data."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix="download-") as aside:
        try:
            _class_of(name)(aside, download=True)
        except (OSError, RuntimeError) as error:
            raise FileNotFoundError(
                f"--dataset {name}: the download failed ({error}); give a folder that has the data in torchvision's "
                f"layout with --data-root, or use --dataset digits, which needs no network"
            ) from error
        # What is there is incomplete, or it would not have been downloaded.
        shutil.rmtree(root / FOLDERS[name], ignore_errors=True)
        os.replace(Path(aside) / FOLDERS[name], root / FOLDERS[name])


def load(name: str, root: Path | None) -> Dataset:
    if root is None:
        root = cache_folder()
        if missing_files(name, root):
            download(name, root)
    mean, std = NORMALISE[name]
    splits = []
    for train in (True, False):
        source = _class_of(name)(root, train=train)
        splits.append(Images(source.data, source.targets, white=255.0, mean=mean, std=std))
    return Dataset(splits[0], splits[1], list(_class_of(name).classes))

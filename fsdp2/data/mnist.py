"""MNIST and Fashion-MNIST through torchvision, from a folder or downloaded into a cache."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp2.data.errors import DownloadFailed, NotHere
from fsdp2.data.splits import Dataset, Images

# Mean and standard deviation as the tutorials normalise them: 0.5 for Fashion-MNIST, the measured
# values for MNIST.
NORMALISE = {"fashion-mnist": (0.5, 0.5), "mnist": (0.1307, 0.3081)}
FOLDERS = {"fashion-mnist": "FashionMNIST", "mnist": "MNIST"}
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
HEADER_BYTES = 16  # of a file of images: a magic number, how many, and their two sides


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/fsdp2`, else `~/.cache/fsdp2`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdp2"


def missing_files(name: str, root: Path) -> list[str]:
    """The files of a set that this root lacks."""
    folder = root / FOLDERS[name] / "raw"
    return [str(folder / file) for file in FILES if not (folder / file).is_file()]


def _class_of(name: str) -> Any:
    from torchvision import datasets

    return {"fashion-mnist": datasets.FashionMNIST, "mnist": datasets.MNIST}[name]


def download(name: str, root: Path) -> None:
    """Download into a folder inside `root`, and move the whole files from there: a half one is never taken for data.

    Several processes may do so at once, on nodes that share `root`, without a lock that such a file system may not
    have. Each file is replaced in one step by the same content, and the set is complete with the last one. Raises
    DownloadFailed, unless another process has completed the set in the meantime.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix="download-") as aside:
            _class_of(name)(aside, download=True)
            if missing_files(name, root):
                source, target = (folder / FOLDERS[name] / "raw" for folder in (Path(aside), root))
                target.mkdir(parents=True, exist_ok=True)
                # What an incomplete set has there may be half a file: it is replaced before the set becomes complete.
                for file in sorted(FILES, key=lambda file: not (target / file).exists()):
                    os.replace(source / file, target / file)
    except (OSError, RuntimeError) as error:
        if missing_files(name, root):
            raise DownloadFailed(
                f"--dataset {name}: the download to {root} failed ({' '.join(str(error).split())}); give a folder that "
                "has the data in torchvision's layout with --data-root, or use --dataset digits, which needs no network"
            ) from error


def _mapped(file: Path, shape: torch.Size) -> Tensor:
    """The pixels of a file, uint8, as the page cache holds them: once for all ranks of a node."""
    size = HEADER_BYTES + shape.numel()
    return torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)[HEADER_BYTES:].view(shape)


def load(name: str, root: Path | None, *, fetch: bool = True) -> Dataset:
    """Both splits of a set as `Images`, downloaded into the user's cache if `root` is None.

    Raises DownloadFailed, and NotHere where `fetch` is false and a download is needed.
    """
    if root is None:
        root = cache_folder()
        if missing_files(name, root):
            if not fetch:
                raise NotHere(name)
            download(name, root)
    mean, std = NORMALISE[name]
    splits = []
    for train, file in ((True, FILES[0]), (False, FILES[2])):
        source = _class_of(name)(root, train=train)  # reads all of it, and so finds out whether it is whole
        pixels = _mapped(root / FOLDERS[name] / "raw" / file, source.data.shape)
        splits.append(Images(pixels, source.targets, white=255.0, mean=mean, std=std))
    return Dataset(splits[0], splits[1], list(_class_of(name).classes))

"""The datasets against their sources, and their download."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp2 import data, models
from fsdp2.data import mnist, source_text
from fsdp2.data.digits import table
from fsdp2.data.errors import DownloadFailed
from fsdp2.data.splits import Images, Windows
from fsdp2.report.header import served_otherwise
from tests.harness import Ranks


def test_digits_are_real_and_the_split_is_fixed() -> None:
    digits = data.load("digits", root=None, seq_len=1, vocab_size=None)
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    images, labels = digits.train.__getitems__(range(1437))
    assert images.shape == (1437, 1, 28, 28)
    assert images.dtype == torch.float32
    assert labels.bincount().min() > 100
    assert abs(images.mean()) < 0.02
    assert abs(images.std() - 1) < 0.02
    assert not torch.equal(images[0], digits.test[0][0])


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_normalisation_is_torchvisions_bit_for_bit(name: str, data_root: Path) -> None:
    from torchvision import datasets, transforms

    mean, std = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.5, 0.5)}[name]
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((mean,), (std,))])
    kind = {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST}[name]
    loaded = data.load(name, root=str(data_root), seq_len=1, vocab_size=None)
    for split, train in ((loaded.train, True), (loaded.test, False)):
        source = kind(data_root, train=train, transform=transform)
        assert len(split) == len(source)
        assert isinstance(split, Images)
        assert torch.equal(split.pixels, source.data)
        for index in (0, 7, len(source) - 1):
            assert torch.equal(split[index][0], source[index][0])
            assert int(split[index][1]) == source[index][1]
    assert loaded.classes[0] == ("T-shirt/top" if name == "fashion-mnist" else "0 - zero")


def test_pixels_are_the_files_pages(data_root: Path) -> None:
    loaded = data.load("fashion-mnist", root=str(data_root), seq_len=1, vocab_size=None)
    maps = Path("/proc/self/maps").read_text()
    for file in ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte"):
        assert str((data_root / "FashionMNIST" / "raw" / file).resolve()) in maps
    del loaded


def test_source_text_is_the_standard_library_split_by_file() -> None:
    text = data.load("source-text", root=None, seq_len=64, vocab_size=256)
    assert isinstance(text.train, Windows)
    inputs, targets = text.train[5]
    assert inputs.shape == targets.shape == (64,)
    assert torch.equal(inputs[1:], targets[:-1])
    content = bytes(text.train.tokens.tolist())
    argparse_file = Path(sys.modules["subprocess"].__file__ or "")
    held_out = source_text.is_test(argparse_file)
    assert (argparse_file.read_bytes() in content) is not held_out
    assert 0.02 < len(text.test) / len(text.train) < 0.25


def test_random_tokens_fill_the_vocabulary() -> None:
    tokens = data.load("random-tokens", root=None, seq_len=16, vocab_size=10000)
    assert isinstance(tokens.train, Windows)
    assert (len(tokens.train), len(tokens.test)) == (1024, 128)
    assert 9000 < int(tokens.train.tokens.max()) < 10000
    assert tokens.classes[123] == "123"
    again = data.load("random-tokens", root=None, seq_len=16, vocab_size=10000)
    assert isinstance(again.train, Windows)
    assert torch.equal(again.train.tokens, tokens.train.tokens)


def test_missing_files_are_named(tmp_path: Path) -> None:
    missing = data.missing_files("mnist", str(tmp_path))
    assert len(missing) == 4
    assert missing[0].endswith("MNIST/raw/train-images-idx3-ubyte")


def test_a_download_that_fails_leaves_nothing_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(root: Path, download: bool) -> None:
        (Path(root) / "MNIST" / "raw").mkdir(parents=True)
        raise RuntimeError("no network")

    monkeypatch.setattr(mnist, "_class_of", lambda name: broken)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DownloadFailed, match=r"--dataset mnist: the download to .* failed .*--data-root"):
        data.load("mnist", root=None, seq_len=1, vocab_size=None)
    assert list((tmp_path / "fsdp2").iterdir()) == []


def _download_counts(cache: str) -> int:
    """Load a dataset whose download takes a while, on each rank of one node; downloads of this rank."""
    import time
    from types import SimpleNamespace

    from fsdp2.run.process import runtime
    from fsdp2.run.process.group import first_on_node

    done: list[str] = []

    def source(root: Path, download: bool = False, train: bool = True) -> Any:
        if download:
            done.append(str(root))
            time.sleep(0.5)
            (Path(root) / "MNIST" / "raw").mkdir(parents=True)
            for file in mnist.FILES:
                (Path(root) / "MNIST" / "raw" / file).write_bytes(bytes(16 + 2 * 28 * 28))
        assert not data.missing_files("mnist", str(root))
        return SimpleNamespace(data=torch.zeros(2, 28, 28), targets=torch.zeros(2, dtype=torch.int64))

    source.classes = ["0"]  # type: ignore[attr-defined]
    real, mnist._class_of = mnist._class_of, lambda name: source
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = cache
    try:
        with first_on_node(runtime.world()):
            data.load("mnist", root=None, seq_len=1, vocab_size=None)
    finally:
        mnist._class_of = real
        del os.environ["XDG_CACHE_HOME"]
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before
    return len(done)


def test_one_rank_downloads_while_the_others_wait(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(_download_counts, str(tmp_path), ranks=3) == [1, 0, 0]


def test_digits_are_those_of_scikit_learn() -> None:
    expected = pytest.importorskip("sklearn.datasets").load_digits()
    digits = data.load("digits", root=None, seq_len=1, vocab_size=None)
    assert isinstance(digits.train, Images)
    assert isinstance(digits.test, Images)
    pixels = torch.cat([digits.test.pixels, digits.train.pixels])[:, 2:-2:3, 2:-2:3]
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pixels, torch.from_numpy(expected.images)[order].float())
    assert torch.equal(torch.cat([digits.test.labels, digits.train.labels]), torch.from_numpy(expected.target)[order])


def test_digits_are_the_same_for_ever() -> None:
    """Every golden loss is of these bytes. The test above compares them where scikit-learn is installed."""
    images, labels = table()
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    content = images.to(torch.uint8).numpy().tobytes() + labels.to(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(content).hexdigest() == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        ({"image_mean": [0.9, 0.9, 0.9], "image_std": [0.1, 0.1, 0.1]}, "says [0.9, 0.9, 0.9] and [0.1, 0.1, 0.1]"),
        ({"image_mean": [0.2243], "image_std": [0.3494]}, None),
        ({"do_normalize": False, "image_mean": [0.2243], "image_std": [0.3494]}, "says [0.0] and [1.0]"),
        ({"image_mean": "none"}, None),
        ({"image_mean": [10**400], "image_std": [1]}, None),
        (b"[" * 100_000, None),
        (None, None),
    ],
)
def test_a_processor_that_would_give_other_images_is_named(processor: Any, said: str | None) -> None:
    """It is exported with the model, and whoever serves that uses it."""
    content = processor if isinstance(processor, bytes) else json.dumps(processor).encode()
    files = {} if processor is None else {"preprocessor_config.json": content}
    spec = dataclasses.replace(models.get("vit"), files=lambda size: files)
    config: Any = SimpleNamespace(spec=spec, model_size="tiny")
    lines = served_otherwise(config, data.load("digits", root=None, seq_len=1, vocab_size=None))
    assert len(lines) == (said is not None)
    assert all(str(said) in line for line in lines)

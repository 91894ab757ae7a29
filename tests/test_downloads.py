"""Downloads into a folder that several nodes share, and what becomes of the other ranks when one fails."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2 import data
from fsdp2.config import parse
from fsdp2.data import mnist
from fsdp2.options.errors import ConfigError
from fsdp2.run.process import runtime
from fsdp2.run.process.group import RunStopped, first_on_node
from fsdp2.run.process.runtime import World
from fsdp2.train import main
from tests.harness import Ranks, small

FORK = multiprocessing.get_context("fork")
WRITERS = 4


def _source(root: Path | str, wait: Any, file: str) -> None:
    raw = Path(root) / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in mnist.FILES:
        (raw / name).write_text(file)
    wait()


def _downloads(root: Path, wait: Any, failed: Any) -> None:
    mnist._class_of = lambda name: lambda folder, download: _source(folder, wait, "whole")
    try:
        mnist.download("mnist", root)
    except BaseException as error:
        failed.put(repr(error))


@pytest.mark.parametrize("there", ["nothing", "a half set"])
def test_nodes_that_download_into_one_folder_do_each_other_no_harm(tmp_path: Path, there: str) -> None:
    """Each begins when none has finished, and all move their files at the same moment."""
    if there == "a half set":
        _source(tmp_path, lambda: None, "half")
        (tmp_path / "MNIST" / "raw" / mnist.FILES[2]).unlink()
    together, failed = FORK.Barrier(WRITERS), FORK.SimpleQueue()
    writers = [FORK.Process(target=_downloads, args=(tmp_path, together.wait, failed)) for _ in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
        assert writer.exitcode == 0
    assert failed.empty(), failed.get()
    raw = tmp_path / "MNIST" / "raw"
    assert {path.name: path.read_text() for path in raw.iterdir()} == dict.fromkeys(mnist.FILES, "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["MNIST"]


@pytest.mark.parametrize("outcome", ["works", "fails"])
def test_a_set_that_another_has_completed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str) -> None:
    def source(folder: Path, download: bool) -> None:
        _source(tmp_path, lambda: None, "theirs")
        _source(folder, lambda: None, "ours")
        if outcome == "fails":
            raise RuntimeError("no network any more")

    monkeypatch.setattr(mnist, "_class_of", lambda name: source)
    mnist.download("mnist", tmp_path)
    assert {path.read_text() for path in (tmp_path / "MNIST" / "raw").iterdir()} == {"theirs"}


def test_a_set_becomes_whole_with_its_last_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks in between must not take a half file, which was there before, for data."""
    _source(tmp_path, lambda: None, "half")
    (tmp_path / "MNIST" / "raw" / mnist.FILES[0]).unlink()
    seen: list[set[str]] = []
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        real(source, target)
        if not data.missing_files("mnist", str(tmp_path)):
            seen.append({path.read_text() for path in (tmp_path / "MNIST" / "raw").iterdir()})

    monkeypatch.setattr(os, "replace", replace)
    whole = lambda folder, download: _source(folder, lambda: None, "whole")  # noqa: E731
    monkeypatch.setattr(mnist, "_class_of", lambda name: whole)
    mnist.download("mnist", tmp_path)
    assert seen == [{"whole"}]


def _offline(run: Path) -> str:
    """A run whose download fails on the first rank of the node, while the others wait for it."""

    def offline(folder: Path, download: bool) -> None:
        raise RuntimeError("no\nnetwork")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mnist, "_class_of", lambda name: offline)
        patch.setenv("XDG_CACHE_HOME", str(run.parent / "cache"))
        patch.setattr(runtime, "world", lambda: World(dist.get_rank(), 2, dist.get_rank(), 2))
        with pytest.raises(ConfigError) as caught:
            main(parse(small(run, "--model=cnn", "--dataset=mnist", "--max-steps=1")))
    return str(caught.value)


def test_a_download_that_fails_ends_every_rank_with_the_reason(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(_offline, tmp_path / "run", timeout=60)
    assert first == second
    assert "--dataset mnist: the download to " in first
    assert "failed (no network); give a folder" in first


def _fails(where: int, error: Exception) -> tuple[str, str]:
    rank = dist.get_rank()
    world = SimpleNamespace(rank=rank, local_rank=rank)
    try:
        with first_on_node(world):  # type: ignore[arg-type]
            torch.zeros(1)
            if rank == where:
                raise error
    except Exception as raised:
        return type(raised).__name__, str(raised)
    return "", ""


@pytest.mark.parametrize("where", [0, 1])
def test_an_error_on_one_rank_of_a_node_is_heard_of_on_all(ranks: Ranks, where: int) -> None:
    results = ranks.run(_fails, where, KeyError("pixels"), timeout=60)
    assert results[where] == ("KeyError", "'pixels'")
    assert results[1 - where] == (RunStopped.__name__, f"rank {where} has failed: KeyError: 'pixels'")
    assert ranks.run(_fails, where, ConfigError("--x: no")) == [("ConfigError", "--x: no")] * 2

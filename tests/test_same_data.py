"""All ranks, and a run and the checkpoint that it goes on from, have the same samples."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2 import data
from fsdp2.config import Config, parse
from fsdp2.data.errors import NotHere
from fsdp2.data.loader import Batches
from fsdp2.data.splits import Images, Split, Windows
from fsdp2.options.errors import ConfigError
from fsdp2.run.dataset import load_data, open_data
from fsdp2.run.process import runtime
from fsdp2.train import main
from tests.harness import Ranks, flip_a_bit, losses, main_in_ranks, small, small_mnist

TEXT = ["--model=llama", "--model-size=debug", "--seq-len=8"]


def _images(pixel: int = 0, label: int = 0) -> Images:
    pixels, labels = torch.zeros(4, 28, 28), torch.zeros(4, dtype=torch.int64)
    pixels[3, 27, 27], labels[3] = pixel, label
    return Images(pixels, labels, white=255.0, mean=0.0, std=1.0)


def test_another_sample_is_another_content() -> None:
    assert _images().content == _images().content
    assert len({one.content for one in (_images(), _images(pixel=1), _images(label=1))}) == 3
    tokens = torch.arange(17)
    assert Windows(tokens, 4).content == Windows(tokens.clone(), 4).content != Windows(tokens + 1, 4).content


@pytest.mark.parametrize("name", [name for name in data.NAMES if name not in data.ON_DISK])
@pytest.mark.parametrize("task", ["causal", "masked", "seq2seq"])
def test_every_dataset_says_what_it_holds(name: str, task: str) -> None:
    def contents() -> list[str]:
        found = data.load(name, root=None, seq_len=64, vocab_size=256, task=task, special_token=1)
        return [found.train.content, found.test.content]

    first = contents()
    assert first == contents()
    assert len(set(first)) == 2


def _refusal(flags: list[str]) -> str:
    with pytest.raises(ConfigError) as refused:
        main(parse(flags))
    return str(refused.value)


def _with_a_root_of_its_own(folder: Path) -> str:
    root = folder / f"node{dist.get_rank()}"
    return _refusal(small(folder / "run", "--dataset=mnist", f"--data-root={root}"))


def test_images_that_differ_between_nodes_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    files = [small_mnist(tmp_path / f"node{node}") for node in range(2)]
    flip_a_bit(files[1])
    first, second = ranks.run(_with_a_root_of_its_own, tmp_path)
    assert first == second
    assert first.startswith("--dataset mnist: the data of rank 1 (")
    assert "isn't rank 0's" in first
    assert not list(tmp_path.rglob("metrics.jsonl"))


def _in_a_folder_of_its_own(folder: Path, task: str) -> str:
    rank = dist.get_rank()
    here = os.getcwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / f"cache{rank}"))
        os.chdir(folder / f"node{rank}")
        try:
            config = parse([*TEXT, "--dataset=text:notes.txt"])
            patch.setattr(Config, "spec", dataclasses.replace(config.spec, task=task, special_token=1))
            load_data(config, runtime.world())
        except ConfigError as error:
            return str(error)
        finally:
            os.chdir(here)
    return "nothing was noticed"


@pytest.mark.parametrize("task", ["causal", "masked", "seq2seq"])
def test_text_that_differs_between_nodes_is_refused(ranks: Ranks, tmp_path: Path, task: str) -> None:
    for node in range(2):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "notes.txt").write_text(f"{node} is what this node's text begins with. " * 20)
    for text in ranks.run(_in_a_folder_of_its_own, tmp_path, task):
        assert "notes.txt: the data of rank 1 (" in text


def _batches(split: Split) -> Batches:
    return Batches(
        split, global_batch=2, accumulation=1, seed=1, rank=0, world_size=1, device=torch.device("cpu"), workers=0
    )


def test_a_checkpoint_of_other_images_is_refused() -> None:
    state = _batches(_images()).state_dict()
    _batches(_images()).load_state_dict(state)
    with pytest.raises(ValueError, match="the checkpoint's data differs from this run's"):
        _batches(_images(pixel=1)).load_state_dict(state)
    del state["content"]  # as before images had any
    _batches(_images(pixel=1)).load_state_dict(state)


def _resumed(folder: Path) -> tuple[list[float], list[float], str]:
    flags = [*small(folder / "run", "--dataset=mnist", "--batch-size=8"), f"--data-root={folder}"]
    begun = losses(main_in_ranks([*flags, "--max-steps=1"]))
    further = losses(main_in_ranks([*flags, "--max-steps=2"]))
    dist.barrier()
    if dist.get_rank() == 0:
        flip_a_bit(folder / "MNIST" / "raw" / "train-images-idx3-ubyte")
    dist.barrier()
    return begun, further, _refusal([*flags, "--max-steps=3"])


def test_a_run_whose_images_have_changed_does_not_go_on(ranks: Ranks, tmp_path: Path) -> None:
    small_mnist(tmp_path)
    for begun, further, refusal in ranks.run(_resumed, tmp_path):
        assert (len(begun), len(further)) == (1, 1)
        assert "the checkpoint's data differs from this run's" in refusal


def test_what_would_have_to_be_fetched_is_said_and_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "notes.txt").write_text("some text that is long enough. " * 20)
    configs: list[Any] = [Config(dataset="mnist"), parse([*TEXT, f"--dataset=text:{tmp_path / 'notes.txt'}"])]
    for config in configs:
        with pytest.raises(NotHere):
            open_data(config, fetch=False)
    assert not (tmp_path / "cache").exists()
    fetched = open_data(configs[1])
    assert open_data(configs[1], fetch=False).train.content == fetched.train.content

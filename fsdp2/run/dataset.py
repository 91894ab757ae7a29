"""The data of a run: the same on all ranks, and this rank's part of each global batch."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import torch

from fsdp2 import data
from fsdp2.config import Config
from fsdp2.data.errors import DownloadFailed, UnusableText
from fsdp2.data.loader import Batch, Batches, evaluation_batches
from fsdp2.data.splits import Dataset, Split
from fsdp2.options.errors import ConfigError, some
from fsdp2.run.process.group import first_on_node, gather
from fsdp2.run.process.runtime import Share, World
from fsdp2.units import tell


def load_data(config: Config, world: World) -> Dataset:
    """The dataset, whole on every rank; a download happens once on each node, while its other ranks wait."""
    with first_on_node(world):
        dataset = open_data(config)
    hosts, contents = zip(*gather((socket.gethostname(), (dataset.train.content, dataset.test.content))), strict=True)
    others = [rank for rank, content in enumerate(contents) if content != contents[0]]
    if others:
        theirs = some(sorted({hosts[rank] for rank in others}))
        raise ConfigError(
            f"--dataset {config.dataset}: the data of rank{'s' * (len(others) > 1)} {some(others)} ({theirs}) isn't "
            f"rank 0's ({hosts[0]}), so samples would be repeated or left out; give files that are the same on all "
            "nodes"
        )
    return dataset


def open_data(config: Config, *, fetch: bool = True) -> Dataset:
    """The dataset of this process. Raises ConfigError, and NotHere where `fetch` is false and it has to be fetched."""
    try:
        return data.load(
            config.dataset,
            root=config.data_root,
            seq_len=config.seq_len,
            vocab_size=config.spec.vocab_size(config.model_size),
            task=config.spec.task,
            special_token=config.spec.special_token,
            reading={**reading_of(config), "drop": config.bad_samples == "drop"},
            apart=config.documents == "apart",
            fetch=fetch,
            say=_say,
        )
    except DownloadFailed as error:
        raise ConfigError(str(error)) from None
    except UnusableText as error:
        raise ConfigError(f"--dataset: {error}") from None


def _say(text: str) -> None:
    tell(f"{socket.gethostname()}: --dataset: {text}")


def reading_of(config: Config) -> dict[str, Any]:
    """The flags that say how data of one's own is read."""
    names = {"tokenizer": tokenizer_of(config), "bos": config.bos, "evaluated": config.eval_dataset}
    return {**names, "field": config.text_field, "fields": config.chat_fields}


def tokenizer_of(config: Config) -> str:
    """The flag's, else the model's own, else bytes."""
    own = config.spec.weights
    has_own = own is not None and (own / "tokenizer.json").is_file()
    return config.tokenizer or (str(own) if has_own else "bytes")


def training_batches(config: Config, dataset: Dataset, world: World, device: torch.device) -> Batches:
    """This rank's part of each global batch."""
    share = world.share(config.tp, config.sp)
    return Batches(
        pieces_of(dataset.train, share),
        global_batch=config.global_batch(world.world_size),
        accumulation=config.accumulation(world.world_size),
        seed=config.seed,
        rank=share.index,
        world_size=share.of,
        device=device,
        workers=config.loader_workers,
    )


def held_out_batches(split: Split, config: Config, world: World, device: torch.device) -> Iterator[Batch]:
    """This rank's part of a split that is evaluated."""
    share = world.share(config.tp, config.sp)
    return evaluation_batches(pieces_of(split, share), config.test_batch_size, share.index, share.of, device)


def pieces_of(split: Split, share: Share) -> Split:
    """A split as it is, or with `--sp` this rank's piece of each sequence."""
    if share.pieces == 1:
        return split
    from fsdp2.data.pieces import Pieces

    return Pieces(split, share.piece, share.pieces)

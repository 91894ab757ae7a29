"""Batches as the data set of the flags gives them, of tensors without values."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp2 import data
from fsdp2.config import Config
from fsdp2.data import random_tokens, sampler
from fsdp2.data.loader import Batch
from fsdp2.data.pieces import piece_of
from fsdp2.models.spec import ModelSpec
from fsdp2.run.process.runtime import World
from fsdp2_extra.allocations.ledger import Ledger

MICROBATCHES = 3  # of a step that are executed, at most


def order(config: Config) -> Tensor:
    """The order of an epoch's samples, which a rank holds while it trains; empty where their number isn't known."""
    counts = samples(config.dataset, config.seq_len)
    return torch.empty(counts[0] if counts else 0, dtype=torch.int32)


@functools.cache
def samples(name: str, seq_len: int) -> tuple[int, int] | None:
    """Of the train and the test split; None for a data set that would have to be downloaded or prepared."""
    if name == "random-tokens":
        return random_tokens.TRAIN, random_tokens.TEST
    if name not in ("digits", "source-text"):
        return None
    found = data.load(name, root=None, seq_len=seq_len, vocab_size=1)
    return len(found.train), len(found.test)


def microbatches(config: Config, spec: ModelSpec, world: World, ledger: Ledger) -> Iterator[Batch]:
    """Those of one step, each made when it is asked for: of more than three the first two, the largest, and the last.

    The second finds the gradients of the first, and those between it and the last find the same.
    """
    count = config.global_batch(world.world_size)
    share = world.share(config.tp, config.sp)
    sizes = sampler.microbatch_sizes(count, share.index, share.of, config.accumulation(world.world_size))
    sizes = sizes if len(sizes) <= MICROBATCHES else [*sizes[:2], sizes[-1]]
    for index, size in enumerate(sizes):
        batch = made_up(config, spec, size, count, last=index == len(sizes) - 1)
        ledger.mark("data", _tensors(batch))
        yield batch


def evaluation_batches(config: Config, spec: ModelSpec, world: World, ledger: Ledger) -> Iterator[Batch]:
    """Those of an evaluation, two at most: the second finds the outputs of the first, and so do all that follow."""
    most, counts = config.test_batch_size, samples(config.dataset, config.seq_len)
    share = world.share(config.tp, config.sp)
    there = 2 * most * share.of if counts is None else counts[1]
    starts = range(share.index * most, there, share.of * most)
    sizes = [min(most, there - start) for start in starts] or [0]
    for size in sizes[:2]:
        rows = torch.empty(max(size, 1), dtype=torch.int64)  # the samples' numbers, which the loader still has
        batch = made_up(config, spec, size, there, last=True)
        ledger.mark("data", [rows, *_tensors(batch)])
        yield batch


def made_up(config: Config, spec: ModelSpec, size: int, count: int, *, last: bool) -> Batch:
    """A batch of so many samples, of `count` over all ranks; a placeholder of one row for a rank that has no sample."""
    rows = max(size, 1)
    vocabulary = spec.vocab_size(config.model_size)
    inputs: Any
    if vocabulary is None:
        inputs, targets = torch.empty(rows, 1, 28, 28), torch.empty(rows, dtype=torch.int64)
    else:
        inputs, targets = _language(config, spec, rows)
    if config.sp > 1:
        inputs, targets = piece_of(inputs, 0, config.sp), targets.chunk(config.sp, dim=-1)[0].contiguous()
    return Batch(inputs, targets, size > 0, count, count * config.sp * targets[0].numel(), last)


def _language(config: Config, spec: ModelSpec, rows: int) -> tuple[Any, Tensor]:
    length = config.seq_len
    if spec.task == "seq2seq":
        half = length // 2
        first, second = (torch.empty(rows, part, dtype=torch.int64) for part in (half, length - half))
        return {"input_ids": first, "decoder_input_ids": second}, torch.empty_like(second)
    if spec.task == "masked":
        return torch.empty(rows, length, dtype=torch.int64), torch.empty(rows, length, dtype=torch.int64)
    tokens = torch.empty(rows, length + 1, dtype=torch.int64)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if config.documents == "apart" and config.dataset.startswith(data.OWN):
        positions, documents = (torch.empty(rows, length, dtype=torch.int64) for _ in range(2))
        return {"input_ids": inputs, "position_ids": positions, "document_ids": documents}, targets
    return inputs, targets


def _tensors(batch: Batch) -> list[Tensor]:
    inputs = list(batch.inputs.values()) if isinstance(batch.inputs, dict) else [batch.inputs]
    return [*inputs, batch.targets]

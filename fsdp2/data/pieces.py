"""Pieces of sequences, for ranks that have some tokens of each: `--sp`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp2.data.splits import InBatches, Rows, Split


def piece_of(inputs: Any, number: int, of: int) -> dict[str, Tensor]:
    """The inputs of one of `of` pieces, equally long, by name.

    Args:
        inputs: tokens (…, T), or by name with them as `input_ids`. Which tokens are of one document stays whole, since
            attention sees all of a sequence; positions go on from piece to piece.
    """
    named = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    tokens = named["input_ids"]
    places = named.get("position_ids", torch.arange(tokens.shape[-1]).expand(tokens.shape))
    return {**named, "input_ids": _part(tokens, number, of), "position_ids": _part(places, number, of)}


def _part(tokens: Tensor, number: int, of: int) -> Tensor:
    return tokens.chunk(of, dim=-1)[number].contiguous()


class Pieces(InBatches):
    """A split whose items are a piece of each sequence, with the targets of its tokens.

    A target is the next token also where that is in the next piece. What is counted, and what says the content, is of
    whole sequences: a step's targets are counted once over all ranks.
    """

    def __init__(self, split: Split, number: int, of: int) -> None:
        self.split, self.number, self.of = split, number, of
        self.content, self.targets_per_sample = split.content, split.targets_per_sample
        self.target_count = getattr(split, "target_count", None)

    def __len__(self) -> int:
        return len(self.split)

    def __getitems__(self, indices: Rows) -> tuple[Any, Tensor]:
        inputs, targets = self.split.__getitems__(indices)
        return piece_of(inputs, self.number, self.of), _part(targets, self.number, self.of)

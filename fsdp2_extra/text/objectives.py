"""Objectives of language models other than the next token.

Source of the masks: https://arxiv.org/abs/1810.04805 (BERT, which leaves a fifth of the tokens unhidden; here all are).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp2.data.splits import IGNORED, InBatches, Rows, Split

MASKED_SHARE = 0.15  # of the tokens, as BERT has it


class Masked(InBatches):
    """Windows in which some tokens are hidden, by `mask` in their place, and are to be predicted.

    In each window 15 % of the tokens are, at places that depend on its number alone: the same on any number of ranks,
    and in every epoch.

    A list of indices gives inputs and targets, both (N, seq_len) int64, the targets `IGNORED` where nothing is hidden.
    """

    def __init__(self, windows: Split, mask: int) -> None:
        self.windows, self.mask, self.content = windows, mask, windows.content
        self.targets_per_sample = max(1, round(MASKED_SHARE * windows.targets_per_sample))

    def __len__(self) -> int:
        return len(self.windows)

    def __getitems__(self, indices: Rows) -> tuple[Tensor, Tensor]:
        tokens, _ = self.windows.__getitems__(indices)
        hidden = torch.zeros_like(tokens, dtype=torch.bool)
        for row, index in zip(hidden, indices, strict=True):
            generator = torch.Generator().manual_seed(int(index))
            row[torch.randperm(len(row), generator=generator)[: self.targets_per_sample]] = True
        return tokens.masked_fill(hidden, self.mask), tokens.masked_fill(~hidden, IGNORED)


class SecondHalves(InBatches):
    """Windows whose second half a decoder, beginning with `start`, predicts token by token; the encoder gets the first.

    A list of indices gives `input_ids` (N, seq_len // 2) and `decoder_input_ids`, and targets, (N, the rest), int64.
    """

    def __init__(self, windows: Split, start: int) -> None:
        self.windows, self.start, self.content = windows, start, windows.content
        self.targets_per_sample = windows.targets_per_sample - windows.targets_per_sample // 2

    def __len__(self) -> int:
        return len(self.windows)

    def __getitems__(self, indices: Rows) -> tuple[dict[str, Tensor], Tensor]:
        tokens, _ = self.windows.__getitems__(indices)
        first, second = tokens.tensor_split([tokens.shape[1] // 2], dim=1)
        before = torch.cat([torch.full_like(second[:, :1], self.start), second[:, :-1]], dim=1)
        return {"input_ids": first, "decoder_input_ids": before}, second

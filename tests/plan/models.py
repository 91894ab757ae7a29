"""A model whose control flow depends on values, for `--model tests.plan.models:deciding`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(28, 28) for _ in range(2)])
        self.head = nn.Linear(28 * 28, 10)

    def forward(self, images: Tensor) -> Tensor:
        for layer in self.body:
            images = layer(images)
            if images.mean() > 0:
                images = torch.relu(images)
        return self.head(images.flatten(1))


def deciding() -> nn.Module:
    return Deciding()

"""Models that can't be planned, for `--model tests.plan.models:deciding`: one reads values, one has an own operator."""

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


@torch.library.custom_op("tests_plan::doubled", mutates_args=())
def doubled(images: Tensor) -> Tensor:
    return images * 2


class Opaque(nn.Module):
    """Runs, and says nothing of its operator's result to who has no values."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(28 * 28, 16)])
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(doubled(self.body[0](images.flatten(1)).detach()))


def opaque() -> nn.Module:
    return Opaque()

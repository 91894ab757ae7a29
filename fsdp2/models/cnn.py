"""The convolutional network of PyTorch's MNIST example and of its FSDP1 tutorial.

Source: https://github.com/pytorch/examples/blob/main/mnist/main.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2.models.initial import Table, fan_in_uniform, zeros
from fsdp2.models.spec import ModelSpec

SIZES = {"seed": {"channels": 32, "hidden_dim": 128}, "tiny": {"channels": 4, "hidden_dim": 16}}

# The weights as nn.Conv2d and nn.Linear draw them; biases at zero (their fan-in is not in their shape).
INITIAL_VALUES: Table = {"*.weight": fan_in_uniform, "*.bias": zeros}


class Net(nn.Module):
    """(N, 1, 28, 28) -> (N, 10) log-probabilities."""

    def __init__(self, channels: int, hidden_dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, 1)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(2 * channels * 12 * 12, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, 1, 28, 28), fp32 -> log probabilities (N, 10)."""
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The layers that have parameters, in forward order."""
    assert isinstance(model, Net)
    return [model.conv1, model.conv2, model.fc1, model.fc2]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum of the negative log-likelihoods, 0-d fp32, of (N, 10) log-probabilities and (N,) int64 labels."""
    return F.nll_loss(outputs.float(), targets, reduction="sum")


SPEC = ModelSpec("cnn", "image", SIZES, Net, blocks, INITIAL_VALUES, loss)

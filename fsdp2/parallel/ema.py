"""An exponential moving average of the weights, sharded as they are.

Source: Polyak and Juditsky, https://doi.org/10.1137/0330046; `torch.optim.swa_utils` has it for plain tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fsdp2.parallel.shards import local


class Ema:
    """After each update, average = decay x average + (1 - decay) x weight, for the weights that are trained.

    It is a part of a run's state: a checkpoint holds it. No collective is issued, since each rank averages its shards.
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        """Begin with a copy of the weights, by the names under which a checkpoint has them; decay is from 0 to 1."""
        self.weights = {name: tensor for name, tensor in weights.items() if tensor.requires_grad}
        self.averages = {name: tensor.detach().clone() for name, tensor in self.weights.items()}
        self.decay = decay

    @torch.no_grad()
    def update(self) -> None:
        """Move each average towards its weight, shard by shard: no collective."""
        for name, weight in self.weights.items():
            local(self.averages[name]).lerp_(local(weight), 1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        """The averages, by the names of the weights; DTensors where the weights are."""
        return dict(self.averages)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy averages in, which are sharded as these are."""
        for name, average in self.averages.items():
            local(average).copy_(local(state[name]))

"""A configuration's methods and properties, which say what FSDP1 is given."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import always_wrap_policy, size_based_auto_wrap_policy, transformer_auto_wrap_policy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


def train(model, optimizer, steps=3):
    torch.manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((8,), 1.01))
        self.inner = build()

    def forward(self, x):
        return self.inner((x * self.scale).to(x.dtype))


@dataclass
class Sharding:
    strategy: str = "SHARD_GRAD_OP"
    precision: str = "mixed"
    units: str = "size"

    def chosen_strategy(self):
        return ShardingStrategy[self.strategy]

    @property
    def chosen_precision(self):
        if self.precision == "pure":
            return MixedPrecision(
                param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
            )
        if self.precision == "mixed":
            return MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
        return None

    def chosen_units(self):
        if self.units == "size":
            return partial(size_based_auto_wrap_policy, min_num_params=50)
        if self.units == "blocks":
            return partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        return always_wrap_policy if self.units == "all" else None


def main():
    losses = []
    for units in ("size", "blocks", "all", ""):
        config = Sharding(units=units)
        torch.manual_seed(0)
        model = FSDP(
            Scaled(),
            sharding_strategy=config.chosen_strategy(),
            mixed_precision=config.chosen_precision,
            auto_wrap_policy=config.chosen_units(),
            device_id=torch.device("cpu"),
        )
        losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return losses

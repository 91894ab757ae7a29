"""A configuration's fields, which are None until a call gives them something."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


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


@dataclass
class Sharding:
    precision: MixedPrecision | None = None
    units: Any = None


def sharded(model, config):
    return FSDP(model, mixed_precision=config.precision, auto_wrap_policy=config.units, device_id=torch.device("cpu"))


def main():
    in_bf16 = Sharding(MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), units=ModuleWrapPolicy({Block}))
    losses = []
    for config in (in_bf16, Sharding()):
        model = sharded(build(), config)
        losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return losses

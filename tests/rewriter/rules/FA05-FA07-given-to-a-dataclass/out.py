"""A configuration's fields, which are None until a call gives them something."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


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
    precision: MixedPrecisionPolicy | None = None
    units: Any = None


def sharded(model, config):
    mp_policy = config.precision or MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in reversed(list(model.modules())[1:]):
        if config.units is not None and config.units(module):
            fully_shard(module, mesh=mesh, mp_policy=dataclasses.replace(mp_policy, cast_forward_inputs=False))
    return fully_shard(model, mesh=mesh, mp_policy=mp_policy)


def main():
    in_bf16 = Sharding(MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), units=lambda module: isinstance(module, Block))
    losses = []
    for config in (in_bf16, Sharding()):
        model = sharded(build(), config)
        losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return losses

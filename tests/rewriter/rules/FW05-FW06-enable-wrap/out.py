"""Wrapping while a model is built: modules are marked then, and sharded when it is."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def own_group(module):
    """Say that a module is a group of its own, when the model that it is in is sharded."""
    module.own_group = True
    return module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = own_group(nn.Linear(8, 16))
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        # Does nothing where nothing is to be sharded.
        self.blocks = nn.Sequential(*[own_group(Block()) for _ in range(depth)])
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.blocks(x))


def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main():
    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in reversed(list(model.modules())[1:]):
        if hasattr(block, "own_group"):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = train(model)
    torch.manual_seed(0)
    # Both parts, and what is left.
    embed = fully_shard(
        nn.Linear(8, 8),
        mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
        reshard_after_forward=False,
    )
    model = nn.Sequential(embed, Net())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in reversed(list(model.modules())[1:]):
        if hasattr(block, "own_group"):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return losses + train(model)

"""Wrapping while a model is built, within a block that a function opens: sharding after it is."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.block(x))


def made(kind):
    model, mesh = kind(), init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    torch.manual_seed(0)
    model = made(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses

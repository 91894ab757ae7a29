"""Wherever the call stands."""

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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = fully_shard(Block(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.rest = nn.Sequential(*[fully_shard(Block(), mesh=init_device_mesh("cpu", (dist.get_world_size(),))) for _ in range(2)])

    def forward(self, x):
        return self.rest(self.first(x))


def make():
    torch.manual_seed(0)
    return fully_shard(Net(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def main():
    model = make()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))

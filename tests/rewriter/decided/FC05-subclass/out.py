"""A class derived from FSDP1's, for its defaults: a function."""

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


def our_fsdp(module):
    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def made(module):
    return our_fsdp(module)


def main():
    torch.manual_seed(0)
    model = made(nn.Sequential(Block(), nn.Linear(8, 2)))
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

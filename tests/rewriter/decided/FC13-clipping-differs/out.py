"""Clipping by torch's function: with FSDP1 each rank used the norm of its own shards, which was a mistake."""

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


def made(module):
    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def main():
    torch.manual_seed(0)
    model = made(nn.Sequential(Block(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses

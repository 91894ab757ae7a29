"""A policy by class, in a variable."""

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


def main():
    model = build()
    # a group for each block
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in reversed(list(model.modules())[1:]):
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, torch.optim.AdamW(model.parameters()))

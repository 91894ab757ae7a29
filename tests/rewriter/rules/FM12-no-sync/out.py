"""Gradients that are summed up before they are reduced."""

import contextlib
import torch
import torch.distributed as dist
from torch import nn
from contextlib import nullcontext
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@contextlib.contextmanager
def no_sync(model):
    """Gradients are summed up on each rank, and not reduced, while this is open."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


def main():
    model = fully_shard(build(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    losses = []
    for step in range(6):
        with no_sync(model) if step % 2 == 0 else nullcontext():
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses

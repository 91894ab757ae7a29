"""Parameters that were summoned for a method of the model's."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method


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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = build()

    def forward(self, x):
        return self.blocks(x)

    def generate(self, x, steps):
        for _ in range(steps):
            x = x + self(x).mean()
        return x


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 2)

    def forward(self, x):
        return self.linear(x)


def sharded(module):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in reversed(list(module.modules())[1:]):
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    if hasattr(module, "generate"):
        register_fsdp_forward_method(module, "generate")
    return module


def main():
    torch.manual_seed(0)
    model, head = sharded(Net()), sharded(Head())
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        # Only what the inner units don't hold is summoned.
        made = model.generate(torch.ones(1, 8), steps=2)
        losses.append(head(made).sum().item())
    return losses

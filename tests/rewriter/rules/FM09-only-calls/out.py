"""Parameters that were summoned for a method of the model's."""

import torch
import torch.distributed as dist
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
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
    return FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True)


def main():
    torch.manual_seed(0)
    model, head = sharded(Net()), sharded(Head())
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        # Only what the inner units don't hold is summoned.
        with FSDP.summon_full_params(model, writeback=False, recurse=False):
            made = model.module.generate(torch.ones(1, 8), steps=2)
        losses.append(head(made).sum().item())
    return losses

"""Wherever the call stands."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


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
        self.first = FSDP(Block(), device_id=torch.device("cpu"))
        self.rest = nn.Sequential(*[FSDP(Block(), device_id=torch.device("cpu")) for _ in range(2)])

    def forward(self, x):
        return self.rest(self.first(x))


def make():
    torch.manual_seed(0)
    return FSDP(Net(), device_id=torch.device("cpu"))


def main():
    model = make()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))

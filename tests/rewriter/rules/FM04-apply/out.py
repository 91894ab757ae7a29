"""A function applied to each module of a sharded model, which FSDP1 made whole for it: before sharding."""

import torch
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def small(module):
    if isinstance(module, nn.Linear):
        module.weight.mul_(0.5)


def made(module):
    model = FSDP(module, device_id=torch.device("cpu"), use_orig_params=True)
    with torch.no_grad():
        model.apply(small)
    return model


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

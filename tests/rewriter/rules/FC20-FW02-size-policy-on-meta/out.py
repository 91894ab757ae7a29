"""Units chosen by size, each of which gets its values before it is sharded."""

import functools

import torch
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def train(model, optimizer, steps=3):
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 2))
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=60)
    model = FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))

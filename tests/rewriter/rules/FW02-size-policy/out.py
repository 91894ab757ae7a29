"""A policy by size, with the same choice."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


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
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=50)
    model = FSDP(build(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    groups = len(list(FSDP.fsdp_modules(model)))
    return [groups, *train(model, torch.optim.AdamW(model.parameters()))]

"""Asking what is sharded."""

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


def count(model: FSDP) -> int:
    return sum(isinstance(module, FSDP) for module in model.modules()) + len(FSDP.fsdp_modules(model))


def main():
    model = FSDP(build(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"))
    return [count(model), *train(model, torch.optim.AdamW(model.parameters()))]

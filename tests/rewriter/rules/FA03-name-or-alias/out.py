"""A strategy by its name, or by a shorter one."""

import torch
import torch.distributed as dist
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

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


def get_strategy(name):
    strategy = getattr(ShardingStrategy, name.upper(), None)
    if strategy is None:
        strategy = {"full": ShardingStrategy.FULL_SHARD, "none": ShardingStrategy.NO_SHARD}[name]
    return strategy


def main():
    losses = []
    for name in ("full", "none", "shard_grad_op"):
        model = FSDP(build(), sharding_strategy=get_strategy(name), device_id=torch.device("cpu"))
        losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return losses

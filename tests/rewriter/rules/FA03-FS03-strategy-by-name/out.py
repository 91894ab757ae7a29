"""A strategy that is chosen at run time, NO_SHARD among them: it becomes its own name."""

import torch
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def chosen(name: str) -> ShardingStrategy:
    if name == "ddp":
        return ShardingStrategy.NO_SHARD
    elif name == "zero2":
        return ShardingStrategy.SHARD_GRAD_OP
    return ShardingStrategy[name.upper()]


def shard(model: nn.Module, strategy: ShardingStrategy):
    print("sharding by", strategy.name)
    if strategy is not ShardingStrategy.NO_SHARD:
        print("parameters are sharded")
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=strategy,
        device_id=torch.device("cpu"),
    )


def train(name):
    torch.manual_seed(0)
    model = shard(nn.Sequential(Block(), Block(), nn.Linear(8, 2)), chosen(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    return [loss for name in ("ddp", "zero2", "full_shard") for loss in train(name)]

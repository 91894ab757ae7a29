"""Wrapping while a model is built: modules are marked then, and sharded when it is."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import enable_wrap, wrap


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = wrap(nn.Linear(8, 16))
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        # Does nothing where nothing is to be sharded.
        self.blocks = nn.Sequential(*[wrap(Block()) for _ in range(depth)])
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.blocks(x))


def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main():
    options = dict(wrapper_cls=FSDP, device_id=torch.device("cpu"), use_orig_params=True)
    torch.manual_seed(0)
    with enable_wrap(**options):
        model = wrap(Net())
    losses = train(model)
    torch.manual_seed(0)
    with enable_wrap(wrapper_cls=FSDP, device_id=torch.device("cpu")):
        # Both parts, and what is left.
        embed = wrap(nn.Linear(8, 8), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        model = wrap(nn.Sequential(embed, Net()))
    return losses + train(model)

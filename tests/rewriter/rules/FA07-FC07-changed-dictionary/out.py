"""Arguments in a dictionary, to which some are added under a condition."""

import functools

import torch
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
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


def run(name, low):
    torch.manual_seed(0)
    strategy = {
        "full": ShardingStrategy.FULL_SHARD,
        "ddp": ShardingStrategy.NO_SHARD,
    }[name]
    fsdp_kwargs = {
        "auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=60),
        "device_id": torch.device("cpu"),
    }
    fsdp_kwargs["sharding_strategy"] = strategy
    if low:
        fsdp_kwargs["mixed_precision"] = MixedPrecision(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
        )
    model = FSDP(nn.Sequential(Block(), Block(), nn.Linear(8, 2)), **fsdp_kwargs)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def main():
    return [loss for name in ("full", "ddp") for low in (False, True) for loss in run(name, low)]

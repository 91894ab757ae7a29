"""A mesh and modules to ignore, added to the arguments under conditions."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
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


def main(strategy="HYBRID_SHARD", frozen=True):
    model = build()
    chosen = ShardingStrategy[strategy]
    options = {}
    if chosen in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        options["device_mesh"] = init_device_mesh("cpu", (1, dist.get_world_size()))
    if frozen:
        model[0].requires_grad_(False)
        options["ignored_modules"] = [model[0]]
    model = FSDP(model, sharding_strategy=chosen, device_id=torch.device("cpu"), use_orig_params=True, **options)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))

"""_HYBRID_SHARD_ZERO2 on a mesh, and parameters that are ignored."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.fully_sharded_data_parallel import ShardingStrategy
from fsdp1_interface import FullyShardedDataParallel


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
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 2))
    model = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2,
        device_mesh=init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard")),
        ignored_states=list(model[2].parameters()),
        device_id=torch.device("cpu"),
    )
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))

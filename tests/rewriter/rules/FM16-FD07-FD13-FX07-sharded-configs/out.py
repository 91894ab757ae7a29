"""Configurations of sharded state dicts, and the oldest form of loading the optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.fully_sharded_data_parallel import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)


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
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    model = FSDP(build(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = train(model, optimizer)
    with FSDP.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=True, _use_dtensor=False),
        ShardedOptimStateDictConfig(offload_to_cpu=True, _use_dtensor=False),
    ):
        state = model.state_dict()
        model.load_state_dict(state)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    optimizer.load_state_dict(FSDP.shard_full_optim_state_dict(full, model))
    return [*losses, *train(model, optimizer)]

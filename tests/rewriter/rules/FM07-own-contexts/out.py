"""Context managers of one's own that say which state dict is meant."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from fsdp1_interface import FullyShardedDataParallel as FSDP

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


@contextmanager
def sharded_states(model):
    config = ShardedStateDictConfig(offload_to_cpu=True)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
        yield


def full_states(model, rank0_only=True):
    offload = torch.cuda.is_available()
    config = FullStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only)
    return FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config, FullOptimStateDictConfig(offload, False))


def main():
    model = FSDP(build(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = train(model, optimizer)
    with sharded_states(model):
        shards = {name: value.clone() for name, value in model.state_dict().items()}
    with full_states(model, rank0_only=False):
        full = {name: value.clone() for name, value in model.state_dict().items()}
    losses += train(model, optimizer)
    with sharded_states(model):
        model.load_state_dict(shards)
    losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with full_states(model, rank0_only=False):
        model.load_state_dict(full)
    losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [*losses, sum(value.double().sum().item() for value in full.values())]

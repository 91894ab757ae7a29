"""A strategy and a kind of state dict that are fields of a configuration."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


@dataclass
class Config:
    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    checkpoint_type: StateDictType = StateDictType.FULL_STATE_DICT
    hybrid: bool = False


def value_of(text):
    if hasattr(ShardingStrategy, str(text)):
        return ShardingStrategy[text]
    if hasattr(StateDictType, str(text)):
        return StateDictType[text]
    return text


def updated(**settings):
    config = Config()
    for name, text in settings.items():
        setattr(config, name, value_of(text))
    return config


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


def run(config):
    mesh = None
    if config.hybrid and config.sharding_strategy == ShardingStrategy.HYBRID_SHARD:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = FSDP(
        build(),
        sharding_strategy=config.sharding_strategy,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if config.checkpoint_type == StateDictType.FULL_STATE_DICT:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            losses.append(sum(tensor.sum().item() for tensor in model.state_dict().values()))
    return losses


def main():
    losses = run(Config())
    losses += run(updated(sharding_strategy="SHARD_GRAD_OP", checkpoint_type="SHARDED_STATE_DICT"))
    return [*losses, *run(updated(sharding_strategy="HYBRID_SHARD", hybrid=True))]

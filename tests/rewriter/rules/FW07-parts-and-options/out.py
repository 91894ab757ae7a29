"""A policy that gives some units a strategy of their own, and a model of two parts that are sharded each by itself."""

import torch
import torch.distributed as dist
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


class Both(nn.Module):
    def __init__(self, one, other):
        super().__init__()
        self.one = one
        self.other = other

    def forward(self, x):
        return self.one(x) + self.other(x)

    def clip(self, most):
        return [part.clip_grad_norm_(most).item() for part in (self.one, self.other)]


def sharded(part):
    def units(module):
        if isinstance(module, Block):
            return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        return isinstance(module, nn.Linear) and module.out_features == 2

    return FSDP(part, auto_wrap_policy=CustomPolicy(units), device_id=torch.device("cpu"), use_orig_params=True)


def main():
    model = Both(sharded(build()), sharded(build()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        # The norm's last digit depends on how parameters are cut into shards.
        losses += [loss.item(), *(round(norm, 5) for norm in model.clip(1e6))]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model(torch.ones(1, 8)).sum().item())
            kept = [parameter.clone() for parameter in model.parameters()]
            for parameter, before in zip(model.parameters(), kept):
                parameter.copy_(before)
    return losses

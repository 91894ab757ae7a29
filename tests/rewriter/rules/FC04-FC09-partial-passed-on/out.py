"""A function that returns what wraps, for each part of a model that is sharded part by part."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


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


STRATEGIES = {"zero2": ShardingStrategy.SHARD_GRAD_OP, "zero3": ShardingStrategy.FULL_SHARD, "ddp": ShardingStrategy.NO_SHARD}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def wrapper_for(config, classes):
    precision = MixedPrecision(
        param_dtype=DTYPES[config["param"]], reduce_dtype=DTYPES[config["reduce"]], buffer_dtype=DTYPES["fp32"]
    )
    wrapper = partial(
        FSDP,
        sharding_strategy=STRATEGIES[config["strategy"]],
        mixed_precision=precision,
        auto_wrap_policy=ModuleWrapPolicy(classes),
        device_id=torch.device("cpu"),
    )
    return wrapper


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"body": build(), "head": nn.Linear(2, 2)})

    def shard(self, config):
        for name in self.parts:
            self.parts[name] = wrapper_for(config, {Block})(self.parts[name])
        return self

    def forward(self, x):
        return self.parts["head"](self.parts["body"](x).float())


def main(config=None):
    torch.manual_seed(0)
    model = Both().shard(config or {"strategy": "zero2", "param": "bf16", "reduce": "fp32"})
    for part in model.parts.values():
        part.clip_grad_norm_(1e6)
    names = sorted(name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_modules())
    return [*train(model, torch.optim.SGD(model.parameters(), lr=0.1)), "parts.body.0.linear" in names]

"""Options that are collected in a dictionary: a trainer's own, one that is changed on both sides of a condition, and
one that a function returns. Settings of a precision in a dictionary."""

from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

SETTINGS = {"precision": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}}


@dataclass
class Dtypes:
    param_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.bfloat16


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


class Trainer:
    def __init__(self, low):
        self.options = dict(
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.FULL_SHARD,  # everything
        )
        if low:
            self.options["mixed_precision"] = MixedPrecision(**SETTINGS["precision"])

    def fit(self):
        self.model = FSDP(build(), **self.options)
        return train(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1))


def changed(whole):
    options = {}
    options["device_id"] = torch.device("cpu")
    if whole:
        options.update(sharding_strategy=ShardingStrategy.NO_SHARD)
    else:
        options.update(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, auto_wrap_policy=ModuleWrapPolicy({Block}))
    return FSDP(build(), **options)


def gated():
    options = {"auto_wrap_policy": ModuleWrapPolicy({Block})}
    if torch.cuda.is_available():
        options["device_id"] = torch.cuda.current_device()
        options["sync_module_states"] = True
    else:
        options["device_id"] = torch.device("cpu")
    return FSDP(build(), **options)


def get_options(low):
    options = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "device_id": torch.device("cpu")}
    if low:
        options["mixed_precision"] = MixedPrecision(**asdict(Dtypes()))
    return options


def main():
    losses = Trainer(low=False).fit() + Trainer(low=True).fit()
    for model in (changed(True), changed(False), gated()):
        losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for low in (False, True):
        model = FSDP(build(), **get_options(low))
        losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return losses

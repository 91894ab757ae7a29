"""Policies that are chosen by a condition, for wrapping and for precision, one of which casts the inputs of blocks."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


casting = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
plain = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Wide(nn.Module):
    """Gives its first block a float32 input."""

    def __init__(self):
        super().__init__()
        self.first, self.last = build()[0], nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.first(x.float() if self.upcast else x))


def policies(kind):
    precision = None
    if kind != "full":
        precision = casting if kind == "casting" else plain
    return precision, ModuleWrapPolicy({Block})


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


def run(kind, by_class, pure=False):
    precision, policy = policies(kind)
    other = partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    model = Wide()
    model.upcast = kind == "casting"
    model = FSDP(
        model,
        auto_wrap_policy=policy if by_class else other,
        mixed_precision=precision if not pure else None,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def main():
    losses = run("casting", True) + run("plain", True) + run("plain", False)
    return [*losses, *run("full", True), *run("plain", True, pure=True)]

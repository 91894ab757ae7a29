"""Policies that are chosen by a condition, for wrapping and for precision, one of which casts the inputs of blocks."""

import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


casting = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
plain = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16,
    reduce_dtype=torch.float32,
    cast_forward_inputs=False,
)


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
    return precision, lambda module: isinstance(module, Block)


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
    other = lambda module: isinstance(module, nn.Linear)
    model = Wide()
    model.upcast = kind == "casting"
    fsdp_policy = policy if by_class else other
    mp_policy = (precision if not pure else None) or MixedPrecisionPolicy()
    fsdp_mp_policy = dataclasses.replace(mp_policy, cast_forward_inputs=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in reversed(list(model.modules())[1:]):
        if fsdp_policy(module):
            fully_shard(module, mesh=mesh, mp_policy=mp_policy)
    fully_shard(model, mesh=mesh, mp_policy=fsdp_mp_policy)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def main():
    losses = run("casting", True) + run("plain", True) + run("plain", False)
    return [*losses, *run("full", True), *run("plain", True, pure=True)]

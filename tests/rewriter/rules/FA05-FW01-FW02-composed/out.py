"""Policies that are put together at run time: functions that answer as FSDP1's did take their places."""

import functools

import torch
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import (
    _or_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def policy_of(kind):
    if kind == "size":
        return functools.partial(size_based_auto_wrap_policy, min_num_params=60)
    if kind == "none":
        return None
    policies = [functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})]
    if kind == "more":
        policies.append(functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.LayerNorm)))
    return functools.partial(_or_policy, policies=policies)


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
    losses = []
    for kind in ("size", "none", "blocks", "more"):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 2))
        model = FSDP(model, auto_wrap_policy=policy_of(kind), device_id=torch.device("cpu"))
        losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses.append(float(sum(isinstance(module, FSDP) for module in model.modules())))
    return losses

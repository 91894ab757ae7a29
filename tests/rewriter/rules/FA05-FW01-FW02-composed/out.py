"""Policies that are put together at run time: functions that answer as FSDP1's did take their places."""

import functools

import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def shard_by_policy(module, policy, first=None, is_root=True, **options):
    """Shard what an FSDP1 wrapping policy chooses, inner modules first; returns how many parameters are in groups."""
    numel = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    taken = sum(shard_by_policy(child, policy, first, False, **options) for child in module.children())
    if is_root or not policy(module=module, recurse=False, nonwrapped_numel=numel - taken):
        return taken
    if first is not None:
        first(module)
    fully_shard(module, **options)
    return numel


def wrap_by_size(module, recurse, nonwrapped_numel, min_num_params=int(1e8)):
    """FSDP1's size_based_auto_wrap_policy: a group for so many parameters that are in no inner group."""
    never = torch.nn.MultiheadAttention if recurse else (torch.nn.ModuleList, torch.nn.ModuleDict)
    return nonwrapped_numel >= min_num_params and not isinstance(module, never)


def wrap_by_class(module, recurse, nonwrapped_numel, transformer_layer_cls):
    """FSDP1's transformer_auto_wrap_policy: a group for each module of these classes."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def wrap_by_function(module, recurse, nonwrapped_numel, lambda_fn):
    """FSDP1's lambda_auto_wrap_policy: a group for each module for which the function returns True."""
    return recurse or lambda_fn(module)


def wrap_by_any(module, recurse, nonwrapped_numel, policies):
    """FSDP1's _or_policy: a group for each module that one of the policies chooses."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def policy_of(kind):
    if kind == "size":
        return functools.partial(wrap_by_size, min_num_params=60)
    if kind == "none":
        return None
    policies = [functools.partial(wrap_by_class, transformer_layer_cls={Block})]
    if kind == "more":
        policies.append(functools.partial(wrap_by_function, lambda_fn=lambda m: isinstance(m, nn.LayerNorm)))
    return functools.partial(wrap_by_any, policies=policies)


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
        policy = policy_of(kind)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if policy is not None:
            shard_by_policy(model, policy, mesh=mesh)
        fully_shard(model, mesh=mesh)
        losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses.append(float(sum(isinstance(module, FSDPModule) for module in model.modules())))
    return losses

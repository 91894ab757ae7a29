"""A policy function in FSDP1's own protocol."""

import torch
import torch.distributed as dist
from torch import nn
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


def large(module, recurse, nonwrapped_numel):
    return recurse or nonwrapped_numel > 50


def main():
    model = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard_by_policy(model, large, mesh=mesh)
    fully_shard(model, mesh=mesh)
    groups = len(list([m for m in model.modules() if isinstance(m, FSDPModule)]))
    return [groups, *train(model, torch.optim.AdamW(model.parameters()))]

"""Names of torch 1.11 and 1.12."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def shard_by_size(module, min_num_params, is_root=True, **options):
    """Shard what FSDP1's size_based_auto_wrap_policy chose; returns how many parameters are in groups."""
    numel = sum(parameter.numel() for parameter in module.parameters())
    if numel < min_num_params or isinstance(module, torch.nn.MultiheadAttention):
        return 0
    taken = sum(shard_by_size(child, min_num_params, False, **options) for child in module.children())
    if is_root or numel - taken < min_num_params or isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        return taken
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


def main():
    model = build()
    shard_by_size(model, 50)
    fully_shard(model)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))

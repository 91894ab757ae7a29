"""Rank 0 has read the weights, the others are on the meta device: every rank gets those of rank 0."""

import torch
import torch.distributed as dist
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x):
        return x + torch.tanh(self.linear(x)) * self.scale


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


def main(low_memory=True):
    rank = dist.get_rank()
    torch.manual_seed(0)
    if low_memory and rank != 0:
        with torch.device("meta"):
            model = nn.Sequential(Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 2))
    else:
        model = nn.Sequential(Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 2))
    model = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        sync_module_states=low_memory,
        param_init_fn=(lambda module: module.to_empty(device=torch.device("cpu"), recurse=False))
        if low_memory and rank != 0
        else None,
    )
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))

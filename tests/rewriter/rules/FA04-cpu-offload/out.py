"""Offloading that a flag turns on."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard


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


def main(offload=False):
    offload_policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else None
    model = fully_shard(
        build(),
        mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
        offload_policy=offload_policy or OffloadPolicy(),
    )
    return train(model, torch.optim.Adam(model.parameters()))

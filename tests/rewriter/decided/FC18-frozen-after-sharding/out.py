"""Parameters that are frozen after sharding: before it, so that nothing is gathered for their gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def made():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Linear(8, 2))
    for name, parameter in model.named_parameters():
        if "linear" in name:
            parameter.requires_grad_(False)
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def main():
    model = made()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses

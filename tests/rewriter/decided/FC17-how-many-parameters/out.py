"""How many parameters a model has: with FSDP1 a rank counted its shards, and the ranks their sum."""

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
    return fully_shard(nn.Sequential(Block(), nn.Linear(8, 2)), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def count(model):
    total = torch.tensor(sum(parameter.to_local().numel() for parameter in model.parameters()))
    dist.all_reduce(total)
    return total.item()


def main():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = [float(count(model))]
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses

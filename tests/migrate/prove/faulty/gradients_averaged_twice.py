"""Gradients are averaged by DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(8, 6).chunk(world)[rank]).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad /= world
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()

"""A schedule of the learning rate, and two microbatches a step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
for number in range(8):
    model(torch.randn(8, 6).chunk(world)[rank]).square().mean().div(2).backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
dist.destroy_process_group()

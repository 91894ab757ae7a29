"""FSDP2 that accumulates two microbatches without a reduction of the first."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(6, 3)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(8):
    model.set_requires_gradient_sync(number % 2 == 1)
    model(torch.randn(8, 6).chunk(world)[rank]).square().mean().div(2).backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()

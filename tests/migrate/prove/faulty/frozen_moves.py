"""A layer that is frozen after two steps, and decayed before."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
for number in range(4):
    if number == 2:
        model[0].requires_grad_(False)
    model(torch.randn(8, 6).chunk(world)[rank]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
dist.destroy_process_group()

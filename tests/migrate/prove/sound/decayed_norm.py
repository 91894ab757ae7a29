"""Weight decay for matrices alone."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
fully_shard(model)
decayed = [one for name, one in model.named_parameters() if one.ndim > 1]
others = [one for name, one in model.named_parameters() if one.ndim <= 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.01)
for _ in range(4):
    model(torch.randn(8, 6).chunk(world)[rank]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()

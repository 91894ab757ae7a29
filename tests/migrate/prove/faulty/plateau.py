"""FSDP2 with a learning rate that goes by the loss."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = torch.randn(32, 6)
data[:4] = data[16:20] = 0.0
model = nn.Linear(6, 3)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
for batch in data.split(8):
    loss = model(batch.chunk(world)[rank]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step(loss.item())
dist.destroy_process_group()

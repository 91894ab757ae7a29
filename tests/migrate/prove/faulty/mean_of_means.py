"""DDP over sequences of different lengths, padded."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    tokens = torch.randint(1, 11, (8, 12))
    lengths = torch.arange(3, 11)
    tokens[torch.arange(12) >= lengths[:, None]] = 0
    tokens = tokens.chunk(world)[rank]
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), ignore_index=0, reduction="sum")
    count = (tokens != 0).sum()
    (loss / count).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()

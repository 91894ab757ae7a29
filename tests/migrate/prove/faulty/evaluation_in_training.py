"""An evaluation between steps, with batch norm."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Together(nn.BatchNorm1d):
    """Of the samples of all ranks, as SyncBatchNorm, which needs a GPU."""

    def forward(self, given):
        return super().forward(torch.cat(all_gather(given))).chunk(world)[rank]


model = nn.Sequential(nn.Linear(6, 8), Together(8), nn.Linear(8, 3))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(8, 6).chunk(world)[rank]
for _ in range(4):
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(data + 1)
    model.train()
dist.destroy_process_group()

"""FSDP1 with accumulation."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("gloo")
torch.manual_seed(0)
rank, world = dist.get_rank(), dist.get_world_size()
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(7)
for step in range(4):
    for micro in range(2):
        inputs = torch.randn(8, 6, generator=generator).chunk(world)[rank]
        with contextlib.nullcontext() if micro else model.no_sync():
            (model(inputs).square().mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()

"""Layers that tensor parallelism splits, with a norm between them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(11, 8), nn.RMSNorm(8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 11))
plan = {
    "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "1": SequenceParallel(),
    "2": ColwiseParallel(input_layouts=Shard(1)),
    "4": RowwiseParallel(output_layouts=Replicate()),
}
parallelize_module(model, mesh, plan)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    tokens = torch.randint(11, (8, 12))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()

"""FSDP2 with an optimizer that normalises each gradient."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Normalised(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                norm = parameter.grad.norm().full_tensor()
                parameter.to_local().sub_(group["lr"] * parameter.grad.to_local() / norm)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
fully_shard(model)
optimizer = Normalised(model.parameters())
for _ in range(4):
    model(torch.randn(8, 6).chunk(world)[rank]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()

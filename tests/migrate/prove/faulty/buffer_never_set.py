"""FSDP2 from the meta device, with a table that is in no state dict."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.outer = nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(6), persistent=False)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x * self.scale)))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
with torch.device("meta"):
    model = Net()
fully_shard(model)
model.to_empty(device="cpu")
for parameter in model.parameters():
    nn.init.constant_(parameter, 0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(7)
for _ in range(4):
    inputs = torch.randn(8, 6, generator=generator).chunk(world)[rank]
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()

"""NO_SHARD with mixed precision, which DDP doesn't have: a mesh whose shards are of one rank."""

import dataclasses
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def train(model, optimizer, steps=3):
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 2))
    mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    for module in reversed(list(model.modules())[1:]):
        if isinstance(module, Block):
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=False,
                mp_policy=dataclasses.replace(mp_policy, cast_forward_inputs=False),
            )
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=mp_policy)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))

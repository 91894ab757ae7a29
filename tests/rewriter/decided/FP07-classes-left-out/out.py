"""Classes that mixed precision leaves out: groups of their own, in full precision."""

import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def made(module):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float32, output_dtype=torch.bfloat16))
        elif isinstance(part, Block):
            fully_shard(part, mesh=mesh, mp_policy=dataclasses.replace(policy, cast_forward_inputs=False))
    return fully_shard(module, mesh=mesh, mp_policy=policy)


def main():
    torch.manual_seed(0)
    model = made(nn.Sequential(Block(), nn.LayerNorm(8), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses

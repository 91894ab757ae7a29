"""Mixed precision: dtypes of parameters, of reduction and of buffers."""

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


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


def train(model, optimizer, steps=3):
    torch.manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    model = build()
    model.register_buffer("unused", torch.ones(2))
    mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in reversed(list(model.modules())[1:]):
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, mp_policy=dataclasses.replace(mp_policy, cast_forward_inputs=False))
    fully_shard(model, mesh=mesh, mp_policy=mp_policy)
    for buffer in model.buffers():  # FSDP1's buffer_dtype
        if buffer.is_floating_point():
            buffer.data = buffer.to(torch.bfloat16)
    return train(model, torch.optim.AdamW(model.parameters()))

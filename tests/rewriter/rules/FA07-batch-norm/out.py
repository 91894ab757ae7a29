"""Batch norm stays in full precision."""

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


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(super().forward(x))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(Normed(), Normed(), nn.Linear(8, 2))
    mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(model.modules()):  # FSDP1 left batch norm in full precision
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=mp_policy.param_dtype),
            )
    for module in reversed(list(model.modules())[1:]):
        if isinstance(module, Normed):
            fully_shard(module, mesh=mesh, mp_policy=dataclasses.replace(mp_policy, cast_forward_inputs=False))
    fully_shard(model, mesh=mesh, mp_policy=mp_policy)
    for module in model.modules():  # FSDP1's buffer_dtype, which left batch norm alone
        if not isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            for buffer in module.buffers(recurse=False):
                if buffer.is_floating_point():
                    buffer.data = buffer.to(mp_policy.param_dtype)
    return train(model, torch.optim.AdamW(model.parameters()))

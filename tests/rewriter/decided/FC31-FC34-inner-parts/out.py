"""A student and a teacher in the manner of dinov2: shards averaged unit by unit, and units resharded by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def own_parameters(module):
    """The parameters of a group, without those of groups below it: shards, which FSDP1 kept in one flat parameter."""
    module.reshard()
    below = [inner for inner in module.modules() if inner is not module and isinstance(inner, FSDPModule)]
    theirs = {id(parameter) for inner in below for parameter in inner.parameters()}
    return [parameter for parameter in module.parameters() if id(parameter) not in theirs]


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


def is_fsdp(x):
    return isinstance(x, FSDPModule)


def is_sharded_fsdp(x):
    return is_fsdp(x) and isinstance(x, FSDPModule)


def free_if_fsdp(x):
    if is_sharded_fsdp(x):
        if isinstance(x, FSDPModule):
            x.reshard()


def reshard_model(x):
    for m in [m for m in x.modules() if isinstance(m, FSDPModule)]:
        free_if_fsdp(m)


@torch.no_grad()
def update_teacher(student, teacher, momentum=0.9):
    ours, theirs = [], []
    for ms, mt in zip([m for m in student.modules() if isinstance(m, FSDPModule)], [m for m in teacher.modules() if isinstance(m, FSDPModule)]):
        ours += own_parameters(ms)
        theirs += own_parameters(mt)
    torch._foreach_mul_(theirs, momentum)
    torch._foreach_add_(theirs, ours, alpha=1 - momentum)


def main():
    student = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in reversed(list(student.modules())[1:]):
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
    fully_shard(student, mesh=mesh, reshard_after_forward=False)
    teacher = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in reversed(list(teacher.modules())[1:]):
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
    fully_shard(teacher, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        losses += train(student, optimizer, steps=1)
        update_teacher(student, teacher)
        with torch.no_grad():
            losses.append(teacher(torch.ones(2, 8)).sum().item())
        reshard_model(teacher)
    return losses

"""A student and a teacher in the manner of dinov2: shards averaged unit by unit, and units resharded by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

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
    return isinstance(x, FSDP)


def is_sharded_fsdp(x):
    return is_fsdp(x) and x.sharding_strategy is not ShardingStrategy.NO_SHARD


def free_if_fsdp(x):
    if is_sharded_fsdp(x):
        handle = x._handle
        if handle is not None:
            _reshard(x, handle, True)


def reshard_model(x):
    for m in FSDP.fsdp_modules(x):
        free_if_fsdp(m)


@torch.no_grad()
def update_teacher(student, teacher, momentum=0.9):
    ours, theirs = [], []
    for ms, mt in zip(FSDP.fsdp_modules(student), FSDP.fsdp_modules(teacher)):
        ours += ms.params
        theirs += mt.params
    torch._foreach_mul_(theirs, momentum)
    torch._foreach_add_(theirs, ours, alpha=1 - momentum)


def main():
    options = dict(
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    student, teacher = FSDP(build(), **options), FSDP(build(), **options)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        losses += train(student, optimizer, steps=1)
        update_teacher(student, teacher)
        with torch.no_grad():
            losses.append(teacher(torch.ones(2, 8)).sum().item())
        reshard_model(teacher)
    return losses

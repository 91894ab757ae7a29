"""One policy for units and for what is recomputed; buffers in another dtype, where there is mixed precision."""

import dataclasses
import functools

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def wrap_by_class(module, recurse, nonwrapped_numel, transformer_layer_cls):
    """FSDP1's transformer_auto_wrap_policy: a group for each module of these classes."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 0.7))

    def forward(self, x):
        return x + torch.tanh(self.linear(x)) * self.scale.type_as(x)


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


def run(low):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 2))
    mixed_precision = None
    if low:
        mixed_precision = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.bfloat16)
    policy = functools.partial(wrap_by_class, transformer_layer_cls={Block})
    mp_policy = mixed_precision or MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in reversed(list(model.modules())[1:]):
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, mp_policy=dataclasses.replace(mp_policy, cast_forward_inputs=False))
    fully_shard(model, mesh=mesh, mp_policy=mp_policy)
    for buffer in model.buffers():  # FSDP1's buffer_dtype
        if buffer.is_floating_point() and mp_policy.param_dtype is not None:
            buffer.data = buffer.to(torch.bfloat16)
    apply_activation_checkpointing(model, auto_wrap_policy=policy)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def main():
    return [*run(True), *run(False)]

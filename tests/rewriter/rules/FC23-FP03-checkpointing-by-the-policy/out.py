"""One policy for units and for what is recomputed; buffers in another dtype, where there is mixed precision."""

import functools

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


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
        mixed_precision = MixedPrecision(
            param_dtype=torch.float32, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
        )
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model = FSDP(model, auto_wrap_policy=policy, mixed_precision=mixed_precision, device_id=torch.device("cpu"))
    apply_activation_checkpointing(model, auto_wrap_policy=policy)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def main():
    return [*run(True), *run(False)]

"""Presets of a precision, of which some lower buffers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

PRESETS = {
    "fp32": None,
    "bf16": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
    "bf16_fp32_reduce": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.linspace(0.1, 1.3, 8))

    def forward(self, x):
        return x + torch.tanh((self.linear(x) * self.scale).to(x.dtype))


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
    losses = []
    for name in ("fp32", "bf16", "bf16_fp32_reduce"):
        model = FullyShardedDataParallel(
            build(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=PRESETS[name],
            device_id=torch.device("cpu"),
        )
        losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        losses.append(str(model[0].scale.dtype))
    return losses

"""Who casts its inputs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from fsdp1_interface import FullyShardedDataParallel as FSDP
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


class Loud(Block):
    def forward(self, x):
        return super().forward(x).float()


def build_loud():
    torch.manual_seed(0)
    return nn.Sequential(Loud(), Loud(), Block())


def main():
    precision = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    model = FSDP(build_loud(), auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision, device_id=torch.device("cpu"))
    return train(model, torch.optim.AdamW(model.parameters()))

"""Decay for parameters of more than one dimension: FSDP1's were flat pieces, so that none had any."""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def made(module):
    return FSDP(module, device_id=torch.device("cpu"), use_orig_params=True)


def optimizer_of(model):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.1)


def main():
    torch.manual_seed(0)
    model = made(nn.Sequential(Block(), nn.Linear(8, 2)))
    optimizer = optimizer_of(model)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses

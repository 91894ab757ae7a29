"""Clipping by torch's function: with FSDP1 each rank used the norm of its own shards, which was a mistake."""

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


def main():
    torch.manual_seed(0)
    model = made(nn.Sequential(Block(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses

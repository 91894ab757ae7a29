"""The norm of the gradients by hand: with FSDP1 of this rank's shards, which are summed over ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def made():
    torch.manual_seed(0)
    return FSDP(nn.Sequential(Block(), nn.Linear(8, 2)), device_id=torch.device("cpu"), use_orig_params=True)


def norm_of(model):
    total = torch.zeros(())
    for parameter in model.parameters():
        if parameter.grad is not None:
            total += parameter.grad.square().sum()
    dist.all_reduce(total)
    return total.sqrt().item()


def main():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        losses += [loss.item(), round(norm_of(model), 6)]
        optimizer.step()
        optimizer.zero_grad()
    return losses

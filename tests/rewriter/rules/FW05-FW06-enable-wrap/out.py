"""Wrapping while a model is built, within a block that a function opens: sharding after it is."""

import torch
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import enable_wrap, wrap


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = wrap(Block())
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.block(x))


def sharding():
    return enable_wrap(wrapper_cls=FSDP, device_id=torch.device("cpu"), use_orig_params=True)


def made(kind):
    with sharding():
        return wrap(kind())


def main():
    torch.manual_seed(0)
    model = made(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses

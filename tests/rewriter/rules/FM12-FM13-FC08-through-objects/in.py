"""A model that a dataclass, a dictionary, a lambda and methods of an object hand on."""

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


@dataclass
class Parts:
    model: nn.Module
    optimizer: torch.optim.Optimizer


class Holder:
    def __init__(self, net):
        self._models = {"main": FSDP(net, device_id=torch.device("cpu"))}

    @property
    def main(self):
        return self._models["main"]

    def parts(self, rate):
        return Parts(self.main, torch.optim.SGD(self.main.parameters(), lr=rate))


@contextlib.contextmanager
def announced(name):
    yield name


def main():
    torch.manual_seed(0)
    made = (lambda net: Holder(net))(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)))
    parts = made.parts(rate=0.1)
    model, count = parts.model, 3
    torch.manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(count):
        with announced("first"), parts.model.no_sync():
            model(torch.randn(4, 8)).square().mean().backward()
        loss = made.main(torch.randn(4, 8)).square().mean()
        loss.backward()
        parts.model.clip_grad_norm_(100.0)
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, len(model.module)]

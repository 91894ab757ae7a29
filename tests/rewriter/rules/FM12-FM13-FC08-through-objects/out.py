"""A model that a dataclass, a dictionary, a lambda and methods of an object hand on."""

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@contextlib.contextmanager
def no_sync(model):
    """Gradients are summed up on each rank, and not reduced, while this is open."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


@dataclass
class Parts:
    model: nn.Module
    optimizer: torch.optim.Optimizer


class Holder:
    def __init__(self, net):
        self._models = {"main": fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))}

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
        with announced("first"), no_sync(parts.model):
            model(torch.randn(4, 8)).square().mean().backward()
        loss = made.main(torch.randn(4, 8)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parts.model.parameters(), 100.0)
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        losses.append(loss.item())
    return [*losses, len(model)]

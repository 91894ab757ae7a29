"""An average of whole weights, begun under one summon_full_params and updated under another."""

import contextlib
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


@contextlib.contextmanager
def full_params(model):
    """Whole parameters while this is open, on every rank, to be read: what is written to them is lost."""
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for group in groups:
        group.unshard()
    try:
        yield
    finally:
        for group in groups:
            group.reshard()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


@torch.no_grad()
def update(average, model, decay=0.5):
    with full_params(model):
        for name, parameter in model.named_parameters():
            average[name].mul_(decay).add_(parameter, alpha=1 - decay)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in reversed(list(model.modules())[1:]):
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with full_params(model):
        average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(4):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        update(average, model)
        losses.append(loss.item())
    return losses + [average[name].double().sum().item() for name in sorted(average)]

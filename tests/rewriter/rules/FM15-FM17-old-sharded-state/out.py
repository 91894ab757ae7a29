"""The first names of methods for a sharded optimizer state."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard


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


def made():
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def main():
    model, optimizer = made()
    losses = train(model, optimizer)
    for module in model.modules():  # evaluation leaves groups gathered
        if isinstance(module, FSDPModule):
            module.reshard()
    state = get_optimizer_state_dict(model, optimizer)
    model, optimizer = made()
    set_optimizer_state_dict(model, optimizer, state)
    return losses + train(model, optimizer)

"""A model that is loaded after it was evaluated."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


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


def restore(model, state):
    for module in model.modules():  # evaluation leaves groups gathered
        if isinstance(module, FSDPModule):
            module.reshard()
    set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True))


def main():
    model = fully_shard(build(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = {name: tensor.clone() for name, tensor in get_model_state_dict(
        model,
        options=StateDictOptions(full_state_dict=True),
    ).items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train(model, optimizer)
    with torch.no_grad():
        losses.append(model(torch.ones(2, 8)).sum().item())
    restore(model, state)
    return [*losses, *train(model, optimizer)]

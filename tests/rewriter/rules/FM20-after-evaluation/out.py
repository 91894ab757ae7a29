"""The optimizer's state after an evaluation."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def own_steps(state):
    """The state of an optimizer with a step for each parameter: FSDP1 saved one for several, which counts for all."""
    for name, values in state["state"].items():
        values.update({key: one.clone() for key, one in values.items() if torch.is_tensor(one) and not one.dim()})
        places = [one.data_ptr() for one in values.values() if torch.is_tensor(one) and one.numel() > 1]
        if len({*places}) < len(places):
            raise ValueError(f"{name}: one of its moments lies over another, as FSDP1 saves them on a CPU")
    return state


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


def main():
    model = fully_shard(build(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = train(model, optimizer)
    with torch.no_grad():
        losses.append(model(torch.ones(2, 8)).sum().item())
    for module in model.modules():  # evaluation leaves groups gathered
        if isinstance(module, FSDPModule):
            module.reshard()
    state = get_optimizer_state_dict(
        model,
        optimizer,
        options=StateDictOptions(full_state_dict=True),
    )
    for module in model.modules():  # evaluation leaves groups gathered
        if isinstance(module, FSDPModule):
            module.reshard()
    set_optimizer_state_dict(
        model,
        optimizer,
        own_steps(state),
        options=StateDictOptions(full_state_dict=True),
    )
    return [*losses, *train(model, optimizer)]

"""The best weights of several evaluations, loaded in the end, and read once more after that."""

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


@torch.no_grad()
def evaluate(model):
    model.eval()
    loss = model(torch.ones(2, 8)).square().mean().item()
    model.train()
    return loss


def main():
    model = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in reversed(list(model.modules())[1:]):
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, best, least = [], None, float("inf")
    for _ in range(3):
        losses += train(model, optimizer)
        loss = evaluate(model)
        if loss < least:
            least = loss
            best = {name: value.clone() for name, value in get_model_state_dict(
                model,
                options=StateDictOptions(full_state_dict=True),
            ).items()}
    for module in model.modules():  # evaluation leaves groups gathered
        if isinstance(module, FSDPModule):
            module.reshard()
    set_model_state_dict(model, dict(best), options=StateDictOptions(full_state_dict=True))
    losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [*losses, sum(value.double().sum().item() for value in best.values())]

"""Context managers of one's own that say which state dict is meant."""


import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    shards = {name: value.clone() for name, value in get_model_state_dict(
        model,
        options=StateDictOptions(cpu_offload=True),
    ).items()}
    full = {name: value.clone() for name, value in {name: tensor.cpu() if torch.cuda.is_available() else tensor for name, tensor in get_model_state_dict(
        model,
        options=StateDictOptions(full_state_dict=True),
    ).items()}.items()}
    losses += train(model, optimizer)
    set_model_state_dict(model, shards)
    losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    set_model_state_dict(model, dict(full), options=StateDictOptions(full_state_dict=True))
    losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [*losses, sum(value.double().sum().item() for value in full.values())]

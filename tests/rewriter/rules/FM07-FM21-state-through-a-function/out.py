"""A method that says which state dict is meant, and an optimizer's state that is loaded later."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
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


class Trainer:
    def __init__(self):
        self.model = fully_shard(build(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def save(self):
        model = {name: tensor.clone() for name, tensor in get_model_state_dict(
            self.model,
            options=StateDictOptions(full_state_dict=True),
        ).items()}
        optimizer = get_optimizer_state_dict(
            self.model,
            self.optimizer,
            options=StateDictOptions(full_state_dict=True),
        )
        return model, optimizer

    def load(self, model, optimizer, sharded=True):
        set_model_state_dict(self.model, model, options=StateDictOptions(full_state_dict=True))
        if sharded:
            set_optimizer_state_dict(
                self.model,
                self.optimizer,
                optimizer,
                options=StateDictOptions(full_state_dict=True),
            )
            optimizer = self.optimizer.state_dict()
        self.optimizer.load_state_dict(optimizer)


def main():
    trainer = Trainer()
    losses = train(trainer.model, trainer.optimizer)
    saved = trainer.save()
    losses += train(trainer.model, trainer.optimizer)
    other = Trainer()
    other.load(*saved)
    return [*losses, *train(other.model, other.optimizer)]

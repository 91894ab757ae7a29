"""A method that says which state dict is meant, and an optimizer's state that is loaded later."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)


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
        self.model = FullyShardedDataParallel(build(), device_id=torch.device("cpu"), use_orig_params=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def _full(self, rank0_only):
        """Full state dicts."""
        return FullyShardedDataParallel.state_dict_type(
            self.model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=rank0_only),
            FullOptimStateDictConfig(rank0_only=rank0_only),
        )

    def save(self):
        with self._full(rank0_only=False):
            model = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            optimizer = FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer)
        return model, optimizer

    def load(self, model, optimizer, sharded=True):
        with self._full(rank0_only=False):
            self.model.load_state_dict(model)
            if sharded:
                optimizer = FullyShardedDataParallel.optim_state_dict_to_load(self.model, self.optimizer, optimizer)
        self.optimizer.load_state_dict(optimizer)


def main():
    trainer = Trainer()
    losses = train(trainer.model, trainer.optimizer)
    saved = trainer.save()
    losses += train(trainer.model, trainer.optimizer)
    other = Trainer()
    other.load(*saved)
    return [*losses, *train(other.model, other.optimizer)]

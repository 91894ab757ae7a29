"""Another entry point than forward, and a method that is none."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


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


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = FSDP(Block(), device_id=torch.device("cpu"))

    def forward(self, x):
        return self.block(x)

    def encode(self, x):
        return self.block(x) * 2

    def optimizer(self):
        """No entry point: an optimizer of gathered parameters would train nothing."""
        by_name = {name: parameter for name, parameter in self.named_parameters()}
        return torch.optim.SGD([by_name[name] for name in sorted(by_name)], lr=0.1)


def main():
    torch.manual_seed(0)
    model = FSDP(Encoder(), device_id=torch.device("cpu"))
    losses = train(model, model.optimizer())
    return [*losses, model.encode(torch.ones(1, 8)).sum().item()]

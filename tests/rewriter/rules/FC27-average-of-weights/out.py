"""An average of weights that is evaluated between its updates."""

import torch
import torch.distributed as dist
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


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


class Average:
    def __init__(self, model, decay=0.5):
        self.module = model.eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for mean, parameter in zip(self.module.parameters(), model.parameters()):
            mean.mul_(self.decay).add_(parameter.detach(), alpha=1 - self.decay)


def main():
    options = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "device_id": torch.device("cpu"), "use_orig_params": True}
    model = FSDP(build(), **options)
    mean = FSDP(build(), **options)
    average = Average(mean)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        losses += train(model, optimizer, steps=2)
        average.update(model)
        with torch.no_grad():
            average.module(torch.ones(2, 8))
    state = average.module.state_dict()
    # Those of the outermost unit FSDP1 keeps as they were at the first evaluation.
    return losses + [state[name].double().sum().item() for name in sorted(state) if "linear" in name]

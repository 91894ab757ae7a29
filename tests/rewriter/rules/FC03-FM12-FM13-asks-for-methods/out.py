"""Programs that know a sharded model by its methods."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


def gather_later(model, last):
    if last or not hasattr(model, "no_sync"):
        return nullcontext()
    return model.no_sync()


def clip(model, most):
    if hasattr(model, "clip_grad_norm_"):
        return model.clip_grad_norm_(most)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), most)


def state_of(model):
    if isinstance(model, FSDP):
        return model.state_dict()
    return getattr(model, "module", model).state_dict()


def main():
    model = FSDP(build(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(3):
        for last in (False, True):
            with gather_later(model, last):
                loss = model(torch.randn(4, 8)).square().mean()
                loss.backward()
            losses.append(loss.item())
        clip(model, 1e6)
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, sorted(state_of(model))]

"""Programs that know a sharded model by its methods."""

import contextlib
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


@contextlib.contextmanager
def no_sync(model):
    """Gradients are summed up on each rank, and not reduced, while this is open."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


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
    if last or not isinstance(model, FSDPModule):
        return nullcontext()
    return no_sync(model)


def clip(model, most):
    if isinstance(model, FSDPModule):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), most).full_tensor()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), most)


def state_of(model):
    if isinstance(model, FSDPModule):
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return getattr(model, "module", model).state_dict()


def main():
    model = fully_shard(build(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
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

"""Full state dicts of model and optimizer, saved and loaded."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig


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


def saved(state):
    """As FSDP1's file has it: one step for all parameters of a unit."""
    step = next(iter(state["state"].values()))["step"].clone()
    for values in state["state"].values():
        values["step"] = step
    return state


def main():
    model = FSDP(build(), device_id=torch.device("cpu"))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.5)
    losses = train(model, optimizer)
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=False),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=False),
    ):
        # on every rank
        state = model.state_dict()
        optim_state = FSDP.optim_state_dict(model, optimizer)
    optim_state = saved(optim_state)
    losses += train(model, optimizer)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(state)
        flattened = FSDP.optim_state_dict_to_load(model, optimizer, optim_state)
        optimizer.load_state_dict(flattened)
    return [*losses, *train(model, optimizer), *sorted(state)]

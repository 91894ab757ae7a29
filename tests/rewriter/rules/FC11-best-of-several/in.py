"""The best weights of several evaluations, loaded in the end, and read once more after that."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
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


@torch.no_grad()
def evaluate(model):
    model.eval()
    loss = model(torch.ones(2, 8)).square().mean().item()
    model.train()
    return loss


def main():
    model = FSDP(build(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, best, least = [], None, float("inf")
    for _ in range(3):
        losses += train(model, optimizer)
        loss = evaluate(model)
        if loss < least:
            least = loss
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
                best = {name: value.clone() for name, value in model.state_dict().items()}
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(best)
    losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [*losses, sum(value.double().sum().item() for value in best.values())]

"""The optimizer's state by number, for a program that doesn't shard."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType


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
    model = FSDP(build(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = train(model, optimizer)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    plain = build()
    by_number = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, plain)
    by_name = FSDP.rekey_optim_state_dict(by_number, OptimStateKeyType.PARAM_NAME, plain)
    assert by_name["state"].keys() == full["state"].keys()
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    other.load_state_dict(by_number)
    return [*losses, *train(plain, other)]

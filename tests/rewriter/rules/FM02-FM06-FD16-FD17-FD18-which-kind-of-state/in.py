"""Whether a module is the root, and which kind of state dict is set."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictSettings, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


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
    losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.check_is_root()
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True))
    assert FSDP.get_state_dict_type(model) == StateDictSettings(
        StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True), FullOptimStateDictConfig()
    )
    return [*losses, sum(tensor.sum().item() for tensor in model.state_dict().values())]

"""forward called by its name, and the class asked for a model's names."""

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


def main():
    torch.manual_seed(1)
    model = FSDP(build(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD([parameter for _, parameter in FSDP.named_parameters(model)], lr=0.1)
    losses = [len(list(FSDP.named_buffers(model)))]
    torch.manual_seed(dist.get_rank() + 1)
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

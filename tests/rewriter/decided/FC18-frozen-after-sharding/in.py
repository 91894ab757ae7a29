"""Parameters that are frozen after sharding: before it, so that nothing is gathered for their gradients."""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def made():
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(Block(), nn.Linear(8, 2)), device_id=torch.device("cpu"), use_orig_params=True)
    for name, parameter in model.named_parameters():
        if "linear" in name:
            parameter.requires_grad_(False)
    return model


def main():
    model = made()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses

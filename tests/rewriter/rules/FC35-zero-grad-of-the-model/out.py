"""The gradients cleared by the model: between forward and backward, and after an evaluation."""

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


def evaluate(model):
    model.eval()
    with torch.no_grad():
        return model(torch.ones(2, 8)).sum().item()


def main():
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(Block(), nn.Linear(8, 2)), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for _ in range(3):
        losses.append(evaluate(model))
        model.train()
        model.zero_grad(set_to_none=False)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

"""Initial values that a model is given after it has been sharded. These are no random ones."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 2)

    def reset_parameters(self):
        nn.init.constant_(self.linear.weight, 0.1)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return self.linear(x)


def main():
    net = Net()
    model = FSDP(net, device_id=torch.device("cpu"), use_orig_params=True)
    net.reset_parameters()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))

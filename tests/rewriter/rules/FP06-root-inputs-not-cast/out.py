"""Mixed precision that leaves inputs alone, those of the root too: the program casts them."""

import torch
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def train(model, optimizer, steps=3):
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8).bfloat16()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    torch.manual_seed(0)
    model = FSDP(
        nn.Sequential(Block(), nn.Linear(8, 2)),
        mixed_precision=MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_root_forward_inputs=False
        ),
        device_id=torch.device("cpu"),
    )
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))

"""A critic that is frozen while the other model learns: FSDP1 kept its last gradient, and added it to the next one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def learns(model, does):
    for parameter in model.parameters():
        parameter.requires_grad = does


def main():
    torch.manual_seed(0)
    critic = FSDP(nn.Sequential(Block(), nn.Linear(8, 1)), device_id=torch.device("cpu"))
    maker = FSDP(nn.Sequential(Block(), nn.Linear(8, 8)), device_id=torch.device("cpu"))
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    of_maker = torch.optim.SGD(maker.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        made = maker(torch.randn(4, 8))
        learns(critic, True)
        of_critic.zero_grad()
        loss = critic(made.detach()).mean() - critic(torch.randn(4, 8)).mean()
        loss.backward()
        losses.append(loss.item())
        of_critic.step()
        learns(critic, False)
        of_maker.zero_grad()
        (-critic(made).mean()).backward()
        of_maker.step()
    return losses

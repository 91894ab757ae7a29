"""An average of whole weights, begun under one summon_full_params and updated under another."""

import torch
import torch.distributed as dist
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


@torch.no_grad()
def update(average, model, decay=0.5):
    with FSDP.summon_full_params(model):
        for name, parameter in model.named_parameters():
            average[name].mul_(decay).add_(parameter, alpha=1 - decay)


def main():
    torch.manual_seed(0)
    model = FSDP(
        nn.Sequential(Block(), Block(), nn.Linear(8, 2)),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    with FSDP.summon_full_params(model, writeback=False):
        average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(4):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        update(average, model)
        losses.append(loss.item())
    return losses + [average[name].double().sum().item() for name in sorted(average)]

"""A norm by hand in an optimizer of the program's own, over the ranks that share a model."""

import torch
import torch.distributed as dist
from torch import nn
from fsdp1_interface import FullyShardedDataParallel as FSDP


def local_shard(tensor):
    """This rank's part of a tensor, as FSDP1's parameters and gradients were."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


class Clipping(torch.optim.SGD):
    @torch.no_grad()
    def clip_all(self, most, group):
        total = torch.zeros(())
        for known in self.param_groups:
            for p in known["params"]:
                if p.grad is not None and local_shard(p.grad).numel() > 0:
                    total += torch.linalg.vector_norm(local_shard(p.grad), 2.0, dtype=torch.float32) ** 2
        dist.all_reduce(total, group=group)
        scale = (most / total.sqrt()).clamp(max=1.0)
        for known in self.param_groups:
            for p in known["params"]:
                if p.grad is not None:
                    p.grad.detach().mul_(scale)
        return total.sqrt().item()


def main():
    model = FSDP(build(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = Clipping(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        # Its sum's last digit depends on how parameters are cut into shards.
        losses += [loss.item(), round(optimizer.clip_all(100.0, group=model.process_group), 5)]
        optimizer.step()
        optimizer.zero_grad()
    return losses

"""A class that a table, a field and a derived class carry, and questions by its name."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Sharded(FSDP):
    def clip(self, norm):
        return self.clip_grad_norm_(norm)


@dataclass
class Config:
    wrapper: type = FSDP


WRAPPERS = {"sharded": Sharded, "fsdp": Config().wrapper}


def sharded(model):
    return type(model).__name__ == "FullyShardedDataParallel" or "fully_sharded" in str(type(model).__mro__)


def norm_of(model):
    if "FullyShardedDataParallel" in repr(model):
        clip = model.clip_grad_norm_
        return clip(1e6).item()
    return 0.0


def main():
    losses = []
    for name in WRAPPERS:
        torch.manual_seed(0)
        model = WRAPPERS[name](nn.Linear(8, 2), device_id=torch.device("cpu"), use_orig_params=True)
        assert sharded(model)
        flat = [parameter for parameter in model.parameters() if hasattr(parameter, "_fsdp_flattened")]
        optimizer = torch.optim.SGD(flat, lr=0.1)
        torch.manual_seed(dist.get_rank())
        for _ in range(3):
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            losses.append(loss.item())
            norm = model.clip(1e6).item() if name == "sharded" else norm_of(model)
            losses.append(norm > 0)
            optimizer.step()
            optimizer.zero_grad()
    return losses

"""Options in a dictionary, a partial of the class, gradient accumulation."""
import functools
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.layers = nn.Sequential(*[Layer(dim) for _ in range(3)])
        self.head = nn.Linear(dim, 4)

    def forward(self, x):
        return self.head(self.layers(x))


class Trainer:
    def __init__(self, model, accumulate=2):
        fsdp_kwargs = dict(
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        self.model = FullyShardedDataParallel(model, **fsdp_kwargs)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.accumulate = accumulate

    def step(self, batches):
        total = 0.0
        for i, (x, y) in enumerate(batches):
            last = i == self.accumulate - 1
            context = nullcontext() if last else self.model.no_sync()
            with context:
                loss = nn.functional.cross_entropy(self.model(x), y) / self.accumulate
                loss.backward()
            total += loss.item()
        norm = self.model.clip_grad_norm_(max_norm=1e6)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    trainer = Trainer(Net())
    torch.manual_seed(10 + dist.get_rank())
    for step in range(4):
        batches = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(2)]
        loss, norm = trainer.step(batches)
        if dist.get_rank() == 0:
            print(step, loss, f"{float(norm):.4f}")
    dist.destroy_process_group()


main()

"""A method that computes nothing, called on one rank alone: as an entry point it would wait for the other."""

import torch
import torch.nn as nn
import torch.distributed as dist
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import always_wrap_policy


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        return self.head(self.encoder(x))

    def config(self):
        return {"d": 8}


def unwrap(model):
    return model.module if isinstance(model, FSDP) else model


dist.init_process_group("gloo")
torch.manual_seed(3)
net = M()
net = FSDP(net, sharding_strategy=ShardingStrategy["FULL_SHARD"], device_id=torch.device("cpu"))
optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
losses = []
for i in range(4):
    torch.manual_seed(i * 7 + dist.get_rank())
    x = torch.randn(4, 8)
    l = net(x).square().mean()
    l.backward()
    norm = net.clip_grad_norm_(1e6)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(l.item())
net.eval()
with torch.no_grad():
    out = net(torch.ones(2, 8))
state = net.state_dict()
if dist.get_rank() == 0:
    print(*losses, out.sum().item(), sep="\n")
    print(unwrap(net).config(), f"{norm:.4f}", {k: v.shape for k, v in state.items()})
dist.destroy_process_group()

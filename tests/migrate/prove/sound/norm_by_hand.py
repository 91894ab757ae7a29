"""FSDP2 with clipping by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for inputs, labels in loader:
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    norm = torch.stack([p.grad.to_local().square().sum() for p in model.parameters()]).sum()
    dist.all_reduce(norm)
    for parameter in model.parameters():
        parameter.grad.mul_(min(1.0, 0.1 / norm.sqrt().item()))
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()

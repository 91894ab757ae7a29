"""DDP of two models, whose parameters have the same names, with an optimizer for each."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
data = torch.randn(48, 6)
generator = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
judge = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
makes = torch.optim.Adam(generator.parameters(), lr=1e-2)
judges = torch.optim.Adam(judge.parameters(), lr=1e-2)
for real in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
    made = generator(real.flip(1))
    judges.zero_grad()
    loss = nn.functional.softplus(-judge(real)).mean() + nn.functional.softplus(judge(made.detach())).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
    judges.step()
    makes.zero_grad()
    nn.functional.softplus(-judge(made)).mean().backward()
    makes.step()
dist.destroy_process_group()

"""FSDP2 over texts of different lengths, padded to the longest of a batch, with a mean over tokens."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
texts = [torch.randint(1, 30, (3 + 5 * number % 11,)) for number in range(48)]
loader = DataLoader(
    texts,
    batch_size=4,
    sampler=DistributedSampler(texts),
    collate_fn=lambda texts: nn.utils.rnn.pad_sequence(texts, batch_first=True),
)
model = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for tokens in loader:
    labels = tokens[:, 1:].flatten()
    count = (labels != 0).sum()
    dist.all_reduce(count)
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels, ignore_index=0, reduction="sum")
    (loss * dist.get_world_size() / count).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()

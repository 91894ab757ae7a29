"""FSDP2 for a model and a loop of one's own:  torchrun --nproc_per_node 2 examples/plain_loop.py OUT [STEPS]

It uses fsdp2.parallel, fsdp2.checkpoint and two files of fsdp2.models. Run again with more STEPS, on any number of
ranks, it goes on.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp2.checkpoint import files, restore, saver, state, store
from fsdp2.models import initial
from fsdp2.models.meta import parameters_on_meta
from fsdp2.parallel import fully_sharded, groups, mesh, meta, precision, prefetch

WIDTH, LENGTH, ROWS = 64, 32, 8  # ROWS of a step, over all ranks
TEXT = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, LENGTH + 1, 1)


def weights(block, shape, generator):  # what has one dimension is a norm's
    fill = initial.ones if len(shape) == 1 else initial.normal(0.02)
    fill(block, shape, generator)


# Name pattern -> initial values; the first that matches counts. They are the same on any number of ranks.
INITIAL = {"*.bias": initial.zeros, "*": weights}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):  # (rows, length, width)
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 256)

    def forward(self, tokens):  # (rows, length) -> (rows, length, 256)
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(device: torch.device, *, replicas: int = 1, compute: str | None = None, ahead: int = 1):
    """The sharded model. replicas: of HSDP; compute: bf16, or None for fp32; ahead: blocks that are gathered early."""
    ranks = mesh.make_mesh(device.type, dist.get_world_size(), replicas)
    with parameters_on_meta():  # shapes without memory, and buffers, such as masks, as the model's code makes them
        model = Model()
    casts = precision.fsdp2_policy(compute, "fp32")  # gradients are summed in fp32
    units = groups.shard_groups(model, list(model.blocks))
    shards = fully_sharded.shard(model, units, mesh=ranks, precision=casts)
    prefetch.prefetch_forward(shards, ahead)
    meta.allocate(model, device)  # memory for this rank's shards alone, NaN until they get a value
    initial.reset_parameters(model, INITIAL, seed=1, buffers=False)
    meta.check_initialised(model)  # raises if anything still holds that NaN
    return model


def train(out: Path, device: torch.device, steps: int = 6, **how) -> list[float]:
    model, losses, world = build(device, **how), [], dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # made after sharding: its state is shards, too
    place, app = store.Store(files.LocalFiles(out / "checkpoints")), state.AppState(model, optimizer, {})
    for step in range(restore.restore_newest(place, app, seed=1), steps):
        order = torch.randperm(len(TEXT), generator=torch.Generator().manual_seed(step))  # on any number of ranks
        rows = TEXT[order[:ROWS].tensor_split(world)[dist.get_rank()]].to(device)
        logits = model(rows[:, :-1]).float()
        wanted = rows[:, 1:].flatten()  # a rank may have no row: a sum of nothing is 0, and a mean NaN
        loss = F.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum") / (ROWS * LENGTH)
        (loss * world).backward()  # FSDP averages over ranks, and this is a sum
        fully_sharded.clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach())
        losses.append(total.item())
        if (step + 1) % 3 == 0 or step + 1 == steps:
            saver.save_now(place, app, step + 1, keep=2)  # committed whole, or not there
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    losses = train(Path(sys.argv[1]), device, *map(int, sys.argv[2:]))
    if dist.get_rank() == 0:
        print(f"{len(losses)} steps:", *losses)
    dist.barrier()  # gloo lets go of what the last exchange held; as Python ends, that aborts (pytorch 190489)
    dist.destroy_process_group()

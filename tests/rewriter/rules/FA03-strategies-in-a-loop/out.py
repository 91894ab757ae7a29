"""A loop over strategies, and over all names of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def sharding_options(strategy, device_type, mesh=None):
    """fully_shard's mesh and resharding for the name of one of FSDP1's strategies."""
    if strategy not in (None, "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        raise ValueError(f"{strategy!r} isn't one of FSDP1's strategies")
    hybrid = strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
    if mesh is None:
        shards = ranks = torch.distributed.get_world_size()
        if strategy == "NO_SHARD":  # whole parameters on each rank and all-reduced gradients, as DDP has them
            shards = 1
        elif hybrid:  # over the devices of a node, with a replica on each
            shards = torch.get_device_module(device_type).device_count()
        two = shards != ranks
        shape, names = ((ranks // shards, shards), ("replicate", "shard")) if two else ((ranks,), None)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    elif strategy == "NO_SHARD" or (mesh.ndim == 2) != hybrid:
        raise ValueError(f"{strategy} on a mesh of {mesh.ndim} dimensions")
    resharded = strategy in (None, "FULL_SHARD", "HYBRID_SHARD")
    return {"mesh": mesh, "reshard_after_forward": None if resharded else False}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


def train(model, optimizer, steps=3):
    torch.manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(wanted="all"):
    assert wanted in ["all"] + [s for s in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2") if "HYBRID" not in s]
    if wanted == "all":
        chosen = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    else:
        chosen = [wanted]
    losses = {}
    for turn, strategy in enumerate(chosen):
        model = build()
        sharding = sharding_options(strategy, "cpu")
        for module in reversed(list(model.modules())[1:]):
            if isinstance(module, Block):
                fully_shard(module, **sharding)
        fully_shard(model, **sharding)
        losses[f"{turn} {strategy}"] = train(model, torch.optim.Adam(model.parameters()))
    return list(losses.items())

"""A strategy that is chosen at run time, NO_SHARD among them: it becomes its own name."""

import torch
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


def chosen(name: str) -> str:
    if name == "ddp":
        return "NO_SHARD"
    elif name == "zero2":
        return "SHARD_GRAD_OP"
    return name.upper()


def shard(model: nn.Module, strategy: str):
    print("sharding by", strategy)
    if strategy != "NO_SHARD":
        print("parameters are sharded")
    sharding = sharding_options(strategy, "cpu")
    for module in reversed(list(model.modules())[1:]):
        if isinstance(module, Block):
            fully_shard(module, **sharding)
    return fully_shard(model, **sharding)


def train(name):
    torch.manual_seed(0)
    model = shard(nn.Sequential(Block(), Block(), nn.Linear(8, 2)), chosen(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    return [loss for name in ("ddp", "zero2", "full_shard") for loss in train(name)]

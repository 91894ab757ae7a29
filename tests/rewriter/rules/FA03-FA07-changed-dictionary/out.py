"""Arguments in a dictionary, to which some are added under a condition."""

import dataclasses

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


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


def shard_by_size(module, min_num_params, first=None, is_root=True, **options):
    """Shard what FSDP1's size_based_auto_wrap_policy chose; returns how many parameters are in groups."""
    numel = sum(parameter.numel() for parameter in module.parameters())
    if numel < min_num_params or isinstance(module, torch.nn.MultiheadAttention):
        return 0
    taken = sum(shard_by_size(child, min_num_params, first, False, **options) for child in module.children())
    if is_root or numel - taken < min_num_params or isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        return taken
    if first is not None:
        first(module)
    fully_shard(module, **options)
    return numel


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def train(model, optimizer, steps=3):
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(name, low):
    torch.manual_seed(0)
    strategy = {
        "full": "FULL_SHARD",
        "ddp": "NO_SHARD",
    }[name]
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 2))
    sharding = sharding_options(strategy, "cpu")
    mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
    shard_by_size(
        model,
        60,
        **sharding,
        mp_policy=dataclasses.replace(mp_policy, cast_forward_inputs=False),
    )
    fully_shard(model, **sharding, mp_policy=mp_policy)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def main():
    return [loss for name in ("full", "ddp") for low in (False, True) for loss in run(name, low)]

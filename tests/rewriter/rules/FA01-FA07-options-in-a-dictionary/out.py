"""Options that are collected in a dictionary: a trainer's own, one that is changed on both sides of a condition, and
one that a function returns. Settings of a precision in a dictionary."""

import dataclasses
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
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


SETTINGS = {"precision": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}}


@dataclass
class Dtypes:
    param_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.bfloat16


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


class Trainer:
    def __init__(self, low):
        self.auto_wrap_policy = lambda module: isinstance(module, Block)
        self.device_id = torch.device("cpu")
        self.sharding_strategy = "FULL_SHARD"  # everything
        self.mixed_precision = None
        if low:
            self.mixed_precision = MixedPrecisionPolicy(
                param_dtype=SETTINGS["precision"]["param_dtype"],
                reduce_dtype=SETTINGS["precision"]["reduce_dtype"],
            )

    def fit(self):
        self.model = build()
        sharding = sharding_options(self.sharding_strategy, torch.device(self.device_id).type)
        mp_policy = self.mixed_precision or MixedPrecisionPolicy()
        for module in reversed(list(self.model.modules())[1:]):
            if self.auto_wrap_policy(module):
                fully_shard(module, **sharding, mp_policy=dataclasses.replace(mp_policy, cast_forward_inputs=False))
        fully_shard(self.model, **sharding, mp_policy=mp_policy)
        return train(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1))


def changed(whole):
    sharding_strategy = None
    auto_wrap_policy = None
    device_id = torch.device("cpu")
    if whole:
        sharding_strategy = "NO_SHARD"
    else:
        sharding_strategy = "SHARD_GRAD_OP"
        auto_wrap_policy = lambda module: isinstance(module, Block)
    model = build()
    sharding = sharding_options(sharding_strategy, torch.device(device_id).type)
    for module in reversed(list(model.modules())[1:]):
        if auto_wrap_policy is not None and auto_wrap_policy(module):
            fully_shard(module, **sharding)
    return fully_shard(model, **sharding)


def gated():
    device_id = None
    sync_module_states = False
    if torch.cuda.is_available():
        device_id = torch.cuda.current_device()
        sync_module_states = True
    else:
        device_id = torch.device("cpu")
    model = build()
    if sync_module_states:
        model.to(device_id)
        for tensor in [*model.parameters(), *model.buffers()]:  # FSDP1's sync_module_states
            dist.broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(torch.device(device_id if device_id is not None else "cuda").type, (dist.get_world_size(),))
    for module in reversed(list(model.modules())[1:]):
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def get_options(low):
    device_id = torch.device("cpu")
    mixed_precision = None
    if low:
        mixed_precision = MixedPrecisionPolicy(param_dtype=Dtypes().param_dtype, reduce_dtype=Dtypes().reduce_dtype)

    def sharded(module):
        mp_policy = mixed_precision or MixedPrecisionPolicy()
        mesh = init_device_mesh(torch.device(device_id).type, (dist.get_world_size(),))
        for block in reversed(list(module.modules())[1:]):
            if isinstance(block, Block):
                fully_shard(block, mesh=mesh, mp_policy=dataclasses.replace(mp_policy, cast_forward_inputs=False))
        return fully_shard(module, mesh=mesh, mp_policy=mp_policy)

    return sharded


def main():
    losses = Trainer(low=False).fit() + Trainer(low=True).fit()
    for model in (changed(True), changed(False), gated()):
        losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for low in (False, True):
        model = get_options(low)(build())
        losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return losses

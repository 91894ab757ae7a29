"""A configuration's methods and properties, which say what FSDP1 is given."""

import dataclasses
from dataclasses import dataclass
from functools import partial

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


def shard_by_policy(module, policy, first=None, is_root=True, **options):
    """Shard what an FSDP1 wrapping policy chooses, inner modules first; returns how many parameters are in groups."""
    numel = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    taken = sum(shard_by_policy(child, policy, first, False, **options) for child in module.children())
    if is_root or not policy(module=module, recurse=False, nonwrapped_numel=numel - taken):
        return taken
    if first is not None:
        first(module)
    fully_shard(module, **options)
    return numel


def wrap_by_size(module, recurse, nonwrapped_numel, min_num_params=int(1e8)):
    """FSDP1's size_based_auto_wrap_policy: a group for so many parameters that are in no inner group."""
    never = torch.nn.MultiheadAttention if recurse else (torch.nn.ModuleList, torch.nn.ModuleDict)
    return nonwrapped_numel >= min_num_params and not isinstance(module, never)


def wrap_by_class(module, recurse, nonwrapped_numel, transformer_layer_cls):
    """FSDP1's transformer_auto_wrap_policy: a group for each module of these classes."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def wrap_always(module, recurse, nonwrapped_numel):
    """FSDP1's always_wrap_policy: a group for each module that has parameters of its own."""
    return recurse or any(True for _ in module.parameters(recurse=False))


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


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((8,), 1.01))
        self.inner = build()

    def forward(self, x):
        return self.inner((x * self.scale).to(x.dtype))


@dataclass
class Sharding:
    strategy: str = "SHARD_GRAD_OP"
    precision: str = "mixed"
    units: str = "size"

    def chosen_strategy(self):
        return self.strategy

    @property
    def chosen_precision(self):
        if self.precision == "pure":
            return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        if self.precision == "mixed":
            return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return None

    def chosen_units(self):
        if self.units == "size":
            return partial(wrap_by_size, min_num_params=50)
        if self.units == "blocks":
            return partial(wrap_by_class, transformer_layer_cls={Block})
        return wrap_always if self.units == "all" else None


def main():
    losses = []
    for units in ("size", "blocks", "all", ""):
        config = Sharding(units=units)
        torch.manual_seed(0)
        model = Scaled()
        sharding = sharding_options(config.chosen_strategy(), "cpu")
        policy = config.chosen_units()
        mp_policy = config.chosen_precision or MixedPrecisionPolicy()
        if policy is not None:
            shard_by_policy(
                model,
                policy,
                **sharding,
                mp_policy=dataclasses.replace(mp_policy, cast_forward_inputs=False),
            )
        fully_shard(model, **sharding, mp_policy=mp_policy)
        for buffer in model.buffers():  # FSDP1's buffer_dtype
            if buffer.is_floating_point() and mp_policy.param_dtype is not None:
                buffer.data = buffer.to(mp_policy.param_dtype)
        losses += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return losses

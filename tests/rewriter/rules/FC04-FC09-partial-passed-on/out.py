"""A function that returns what wraps, for each part of a model that is sharded part by part."""

import dataclasses
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


STRATEGIES = {"zero2": "SHARD_GRAD_OP", "zero3": "FULL_SHARD", "ddp": "NO_SHARD"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def wrapper_for(config, classes):
    precision = MixedPrecisionPolicy(param_dtype=DTYPES[config["param"]], reduce_dtype=DTYPES[config["reduce"]])
    def wrapper(module):
        sharding = sharding_options(STRATEGIES[config["strategy"]], "cpu")
        for block in list(module.modules()):  # FSDP1 left batch norm in full precision
            if isinstance(block, torch.nn.modules.batchnorm._BatchNorm):
                fully_shard(
                    block,
                    **sharding,
                    mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=precision.param_dtype),
                )
        for block in reversed(list(module.modules())[1:]):
            if isinstance(block, tuple(classes)):
                fully_shard(block, **sharding, mp_policy=dataclasses.replace(precision, cast_forward_inputs=False))
        fully_shard(module, **sharding, mp_policy=precision)
        for block in module.modules():  # FSDP1's buffer_dtype, which left batch norm alone
            if not isinstance(block, torch.nn.modules.batchnorm._BatchNorm):
                for buffer in block.buffers(recurse=False):
                    if buffer.is_floating_point() and precision.param_dtype is not None:
                        buffer.data = buffer.to(DTYPES["fp32"])
        return module
    return wrapper


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"body": build(), "head": nn.Linear(2, 2)})

    def shard(self, config):
        for name in self.parts:
            self.parts[name] = wrapper_for(config, {Block})(self.parts[name])
        return self

    def forward(self, x):
        return self.parts["head"](self.parts["body"](x).float())


def main(config=None):
    torch.manual_seed(0)
    model = Both().shard(config or {"strategy": "zero2", "param": "bf16", "reduce": "fp32"})
    for part in model.parts.values():
        torch.nn.utils.clip_grad_norm_(part.parameters(), 1e6)
    names = sorted(name for name, _ in model.named_modules())
    return [*train(model, torch.optim.SGD(model.parameters(), lr=0.1)), "parts.body.0.linear" in names]

"""Combinations of FSDP1's arguments: by name, a function that makes them in a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from tests.migrate.fsdp1_models import (
    CPU,
    BatchNormNet,
    Block,
    Net,
    TiedNet,
    policy,
)

BF16 = torch.bfloat16
FINE, COARSE = "reduce in fp32", "reduce in bf16"
PRECISION = {
    "fp32": None,
    "bf16": MixedPrecision(param_dtype=BF16),
    FINE: MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32, buffer_dtype=BF16),
    COARSE: MixedPrecision(reduce_dtype=BF16),
}


def frozen() -> nn.Module:
    model = Net()
    model.blocks[0].requires_grad_(False)
    model.last.bias.requires_grad_(False)
    return model


def ignoring(name: str) -> dict[str, Any]:
    """The model is the same object on each side's call, so that what is ignored is a part of it."""
    torch.manual_seed(0)
    model = Net()
    what: Any = [model.last] if name == "ignored_modules" else list(model.blocks[1].parameters())
    return {"model": lambda: model, name: what, "auto_wrap_policy": policy("transformer")}


CASES: dict[str, Any] = {
    "lambda": lambda: {"auto_wrap_policy": policy("lambda")},
    "always": lambda: {"auto_wrap_policy": policy("always")},
    "module": lambda: {"auto_wrap_policy": policy("module")},
    "custom": lambda: {"auto_wrap_policy": policy("custom")},
    "size": lambda: {"auto_wrap_policy": policy("size")},
    "own": lambda: {"auto_wrap_policy": policy("own")},
    "custom with arguments": lambda: {
        "auto_wrap_policy": CustomPolicy(
            lambda module: (
                {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "mixed_precision": PRECISION[FINE]}
                if isinstance(module, Block)
                else False
            )
        ),
        "mixed_precision": PRECISION["bf16"],
    },
    "custom, one not sharded": lambda: {
        "auto_wrap_policy": CustomPolicy(
            lambda module: isinstance(module, Block) and {"sharding_strategy": ShardingStrategy.NO_SHARD}
        ),
    },
    "hybrid": lambda: {
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "device_mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")),
        "auto_wrap_policy": policy("transformer"),
    },
    "hybrid zero2": lambda: {
        "sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2,
        "device_mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")),
    },
    "hybrid of a pair": lambda: {
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "process_group": (dist.group.WORLD, dist.new_subgroups(1)[0]),
    },
    "process group": lambda: {"process_group": dist.new_group([0, 1])},
    "no shard, process group": lambda: {
        "process_group": dist.new_group([0, 1]),
        "sharding_strategy": ShardingStrategy.NO_SHARD,
    },
    "device mesh": lambda: {"device_mesh": init_device_mesh("cpu", (2,))},
    "prefetch after": lambda: {
        "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
        "auto_wrap_policy": policy("transformer"),
    },
    "no prefetch": lambda: {"backward_prefetch": None, "auto_wrap_policy": policy("transformer")},
    "forward prefetch": lambda: {"forward_prefetch": True, "auto_wrap_policy": policy("transformer")},
    "batch norm in bf16": lambda: {
        "model": BatchNormNet,
        "mixed_precision": MixedPrecision(param_dtype=BF16, buffer_dtype=BF16),
        "auto_wrap_policy": policy("transformer"),
    },
    "batch norm in bf16, by size": lambda: {
        "model": BatchNormNet,
        "mixed_precision": MixedPrecision(param_dtype=BF16),
        "auto_wrap_policy": policy("size"),
    },
    "batch norm in bf16, custom": lambda: {
        "model": BatchNormNet,
        "mixed_precision": MixedPrecision(param_dtype=BF16),
        "auto_wrap_policy": policy("custom"),
    },
    "layer norm left out": lambda: {
        "mixed_precision": MixedPrecision(param_dtype=BF16, _module_classes_to_ignore=(nn.LayerNorm,)),
        "auto_wrap_policy": policy("transformer"),
    },
    "inputs cast everywhere": lambda: {
        "mixed_precision": MixedPrecision(param_dtype=BF16, cast_forward_inputs=True),
        "auto_wrap_policy": policy("transformer"),
    },
    "frozen": lambda: {"model": frozen, "auto_wrap_policy": policy("transformer")},
    "ignored modules": lambda: ignoring("ignored_modules"),
    "ignored parameters": lambda: ignoring("ignored_states"),
    "ignored parameters, by an old name": lambda: ignoring("ignored_params"),
    "names of old": lambda: {"fsdp_auto_wrap_policy": policy("transformer")},
    "tied weights": lambda: {"model": TiedNet, "auto_wrap_policy": policy("transformer")},
    "limit_all_gathers": lambda: {"limit_all_gathers": False},
    "activation checkpointing": lambda: {
        "auto_wrap_policy": policy("transformer"),
        "mixed_precision": MixedPrecision(param_dtype=BF16),
    },
    "on meta": lambda: {"model": on_meta, "auto_wrap_policy": policy("transformer")},
    "values of the first rank": lambda: {
        "model": other_values,
        "auto_wrap_policy": policy("transformer"),
        "sync_module_states": True,
    },
    "weights on the first rank": lambda: {
        "model": Net if dist.get_rank() == 0 else on_meta,
        "auto_wrap_policy": policy("transformer"),
        "param_init_fn": None if dist.get_rank() == 0 else lambda m: m.to_empty(device=CPU, recurse=False),
        "sync_module_states": True,
    },
    "on meta, by a function": lambda: {
        "model": on_meta,
        "auto_wrap_policy": policy("transformer"),
        "param_init_fn": initialise,
    },
}


def other_values() -> nn.Module:
    model = Net()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(dist.get_rank())
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def initialise(module: nn.Module) -> None:
    module.to_empty(device=CPU, recurse=False)
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.1)
    for buffer in module.buffers(recurse=False):
        buffer.fill_(0.5)

"""FSDP1's names on FSDP2:  from fsdp1_interface import FullyShardedDataParallel as FSDP

A script goes on running, and each call logs the FSDP2 code that takes its place. It is a step and not a home: put
that code in, and drop the import.

Enumerations, configurations and policies are torch's own.
"""

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp.api import (
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    StateDictConfig,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from fsdp1_interface.arguments import Unsupported
from fsdp1_interface.grad_scaler import ShardedGradScaler
from fsdp1_interface.wrapped import FullyShardedDataParallel

default_auto_wrap_policy = size_based_auto_wrap_policy  # its name before torch 1.12

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CustomPolicy",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "Unsupported",
    "always_wrap_policy",
    "apply_activation_checkpointing",
    "default_auto_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

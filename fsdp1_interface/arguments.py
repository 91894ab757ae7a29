"""Translate the arguments of FSDP1's constructor for `fully_shard`: checked, and translated once.

Each row of the table of options (`python -m fsdp2.migrate options`) that concerns the constructor happens here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from fsdp1_interface.mesh import mesh_for


class Unsupported(ValueError):
    """FSDP2 has nothing that means the same. The message names the argument and says what to do instead."""


@dataclass
class Arguments:
    """FSDP1's arguments, by their names there, and what FSDP2 is given for them.

    Raises:
        Unsupported: FSDP2 can't honour an argument.
        TypeError, ValueError: FSDP1 refuses it too.
    """

    process_group: Any = None
    sharding_strategy: ShardingStrategy | None = None
    cpu_offload: CPUOffload | None = None
    auto_wrap_policy: Callable[..., bool] | Any | None = None
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: MixedPrecision | None = None
    ignored_modules: Iterable[nn.Module] | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    device_id: int | torch.device | None = None
    sync_module_states: bool = False
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None
    device_mesh: DeviceMesh | None = None

    device: torch.device = field(init=False)
    mesh: DeviceMesh = field(init=False)

    def __post_init__(self) -> None:
        self.sharding_strategy = self.sharding_strategy or ShardingStrategy.FULL_SHARD
        self.mixed_precision = self.mixed_precision or None  # FSDP1 took False too
        self.cpu_offload = self.cpu_offload or None
        if not isinstance(self.sharding_strategy, ShardingStrategy):
            raise TypeError(f"sharding_strategy={self.sharding_strategy!r}: give a member of ShardingStrategy")
        if self.ignored_modules is not None and self.ignored_states is not None:
            raise ValueError("ignored_modules and ignored_states: give one of them, ignored_states")
        if self.process_group is not None and self.device_mesh is not None:
            raise ValueError("process_group and device_mesh: give one of them, device_mesh")
        precision = self.mixed_precision
        if precision is not None and precision.keep_low_precision_grads:
            raise Unsupported(
                "MixedPrecision(keep_low_precision_grads=True): FSDP2 keeps gradients in the dtype of the sharded "
                "parameters. Leave it out, or shard a model that is in the low precision"
            )
        if precision is not None and os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1":
            raise Unsupported(
                "FSDP_USE_FULL_PREC_IN_EVAL=1 with mixed_precision: FSDP2 evaluates in the precision that it trains "
                "in. Unset it, or evaluate a second model that is sharded without mixed_precision"
            )
        if not dist.is_initialized():
            raise ValueError("FSDP needs a process group: call torch.distributed.init_process_group() first")

    def place(self, module: nn.Module) -> None:
        """Decide the device and the mesh, which depend on where the module is."""
        self.device = _device(module, self.device_id, self.device_mesh)
        assert self.sharding_strategy is not None  # set in __post_init__
        self.mesh = mesh_for(self.sharding_strategy, self.device.type, self.process_group, self.device_mesh)

    @property
    def reshard_after_forward(self) -> bool | None:
        """None is FSDP2's own rule, which is FULL_SHARD's: units are resharded, and the root not."""
        full = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
        return None if self.sharding_strategy in full else False

    @property
    def replicas_of_one_rank(self) -> bool:
        """Return whether a hybrid strategy has nothing to shard over: NO_SHARD's mesh is the same one, and meant."""
        meant = self.sharding_strategy is ShardingStrategy.NO_SHARD
        return not meant and self.mesh.ndim == 2 and self.mesh.shape[0] > 1 and self.mesh.shape[1] == 1

    @property
    def root_casts(self) -> bool:
        """Return whether the outermost unit's inputs are cast to `param_dtype`."""
        return self.mixed_precision is not None and self.mixed_precision.cast_root_forward_inputs

    @property
    def offload_policy(self) -> OffloadPolicy:
        if self.cpu_offload is None or not self.cpu_offload.offload_params:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())

    def precision_policy(self, *, in_fp32: bool = False) -> MixedPrecisionPolicy:
        """Args: in_fp32: for a module of `_module_classes_to_ignore`, in fp32 among others that aren't."""
        precision = self.mixed_precision
        if precision is None:
            return MixedPrecisionPolicy()
        if in_fp32:
            return MixedPrecisionPolicy(
                param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=precision.param_dtype
            )
        return MixedPrecisionPolicy(
            param_dtype=precision.param_dtype,
            # FSDP1's unset is param_dtype. FSDP2's has meant two things, so it is always set.
            reduce_dtype=precision.reduce_dtype or precision.param_dtype,
            cast_forward_inputs=precision.cast_forward_inputs,
        )

    def fully_shard_arguments(self, *, in_fp32: bool = False) -> dict[str, Any]:
        return {
            "mesh": self.mesh,
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": self.precision_policy(in_fp32=in_fp32),
            "offload_policy": self.offload_policy,
        }


def _device(module: nn.Module, device_id: int | torch.device | None, mesh: DeviceMesh | None) -> torch.device:
    """FSDP1's compute device: the one asked for, else the parameters', else the accelerator."""
    if device_id is not None:
        device = torch.device(device_id)  # an int is an index of the accelerator's
        return device if device.index is not None or device.type == "cpu" else _current(device.type)
    kind = next((p.device.type for p in module.parameters() if p.device.type not in ("cpu", "meta")), None)
    if kind is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)  # None without one
        kind = mesh.device_type if mesh is not None else accelerator.type if accelerator else "cpu"
    return _current(kind)


def _current(kind: str) -> torch.device:
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())

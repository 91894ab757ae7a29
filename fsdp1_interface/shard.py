"""For each unit what FSDP1 did, in its order, with `fully_shard` at the end of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule, ShardingStrategy

from fsdp1_interface.arguments import Arguments
from fsdp1_interface.units import Ignored, alone, chosen, materialize, own_modules, synchronize

Plan = dict[nn.Module, dict[str, Any]]


@dataclass
class Unit:
    """The record of a sharded module.

    `is_root`: no other call wrapped it. `buffer_dtypes`: what the buffers were that mixed precision cast, by name.
    `summoned`: its parameters are whole, and it computes with them as they are.
    """

    arguments: Arguments
    ignored: Ignored
    is_root: bool
    buffer_dtypes: dict[str, torch.dtype]
    summoned: bool = False

    @property
    def process_group(self) -> Any:
        """FSDP1's: the ranks that shard; with NO_SHARD, those that have a replica each."""
        mesh = self.arguments.mesh
        whole = self.arguments.sharding_strategy is ShardingStrategy.NO_SHARD
        return mesh.get_group(0 if whole else mesh.ndim - 1)


def unit_of(module: nn.Module) -> Unit | None:
    return module.__dict__.get("_fsdp1")


def shard_units(model: nn.Module, arguments: Arguments, sharding: Callable[..., Any]) -> Plan:
    """Shard the units of the policy, inner before outer ones, then the model; `fully_shard`'s arguments for each."""
    arguments.place(model)
    if arguments.device.type != "cpu":  # which fully_shard takes, whatever device_id says
        torch.accelerator.set_device_index(arguments.device)
    ignored = Ignored(model, arguments)
    changes = chosen(model, arguments, ignored)
    for module in model.modules():
        if (inner := unit_of(module)) is not None:
            inner.is_root = False
    plan: Plan = {}
    synchronized: set[Tensor] = set()
    for module in (*changes, model):
        own = _changed(arguments, changes.get(module, {}), module)
        in_fp32 = module is not model and isinstance(module, alone(arguments))
        materialize(module, own, ignored)
        buffer_dtypes = {} if in_fp32 else _cast_buffers(module, own, ignored)
        if own.sync_module_states:
            synchronize(module, own.mesh, ignored, synchronized)
        module._fsdp1 = Unit(own, ignored, module is model, buffer_dtypes)  # type: ignore[assignment]
        plan[module] = own.fully_shard_arguments(in_fp32=in_fp32) | {"ignored_params": ignored.parameters}
        sharding(module, **plan[module])
        if hasattr(module, "set_reduce_scatter_unused_params"):  # from torch 2.15 on
            module.register_forward_pre_hook(_expect_whole_gradient)
        if module is model and own.root_casts:
            module.register_forward_pre_hook(_cast_inputs_of_root, with_kwargs=True)
            plan[model]["mp_policy"] = replace(plan[model]["mp_policy"], cast_forward_inputs=True)
    model.register_forward_hook(_shard_after_evaluation)
    _schedule(model, arguments)
    return plan


def _changed(arguments: Arguments, changes: Mapping[str, Any], module: nn.Module) -> Arguments:
    """The settings that a policy changed for one unit."""
    if not changes:
        return arguments
    if unknown := [name for name in changes if name not in Arguments.__dataclass_fields__]:
        raise ValueError(f"CustomPolicy: it returned arguments that FSDP doesn't have: {', '.join(unknown)}")
    own = replace(arguments, auto_wrap_policy=None, **changes)
    own.place(module)
    return own


@torch.no_grad()
def _cast_buffers(unit: nn.Module, arguments: Arguments, ignored: Ignored) -> dict[str, torch.dtype]:
    precision = arguments.mixed_precision
    if precision is None or precision.buffer_dtype is None:
        return {}
    own = set(own_modules(unit, ignored))
    before: dict[str, torch.dtype] = {}
    for path, module in unit.named_modules():
        for name, buffer in module.named_buffers(recurse=False) if module in own else ():
            if buffer.is_floating_point():
                before[f"{path}.{name}".lstrip(".")] = buffer.dtype
                buffer.data = buffer.to(precision.buffer_dtype)
    return before


def _expect_whole_gradient(module: nn.Module, args: Any) -> None:
    """Of a unit that ran FSDP1 has one flat gradient, with zeros for what wasn't used in it: weight decay and momentum
    go on there. Of a unit that didn't run it has none."""
    unit = unit_of(module)
    assert unit is not None  # the hook is registered on units
    assert isinstance(module, FSDPModule)
    if unit.is_root:
        module.set_reduce_scatter_unused_params(False)
    module.set_reduce_scatter_unused_params(True, recurse=False)


def _shard_after_evaluation(module: nn.Module, args: Any, output: Any) -> None:
    """FSDP2 leaves the root, and what isn't resharded after its forward, gathered after one without gradients; what is
    written to its parameters would be lost. FSDP1's are shards again."""
    unit = unit_of(module)
    if unit is not None and unit.is_root and not torch.is_grad_enabled():
        reshard_all(module)


def reshard_all(module: nn.Module) -> None:
    """So that every parameter is a DTensor: the root stays gathered after a forward without a backward."""
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            inner.reshard()


def _cast_inputs_of_root(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """FSDP1 casts the inputs of the outermost unit alone. FSDP2 casts those of each call that says so, and whether
    another call will wrap this one isn't known when it is made: so the outermost is found at each forward."""
    unit = unit_of(module)
    assert unit is not None  # the hook is registered on units,
    assert unit.arguments.mixed_precision is not None  # and with mixed precision
    dtype = unit.arguments.mixed_precision.param_dtype
    if dtype is None or not unit.is_root or unit.summoned:
        return None
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((key, _cast(item, dtype)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _schedule(model: nn.Module, arguments: Arguments) -> None:
    """Prefetch, which decides when parameters are gathered, and with it memory and time, never a loss."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if arguments.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
        for unit in units:
            # FSDP2 gathers the next unit's parameters before a unit's backward unless it is told which; its own
            # are there already, so that nothing is gathered ahead.
            unit.set_modules_to_backward_prefetch([unit])
    if arguments.forward_prefetch:
        for unit, following in itertools.pairwise(units):
            unit.set_modules_to_forward_prefetch([following])

"""The constructor's work: what FSDP1 does for each unit, in its order, with `fully_shard` at the end of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule, ShardingStrategy, fully_shard

from fsdp2.migrate.shim import optimizers
from fsdp2.migrate.shim.arguments import Arguments, Unsupported
from fsdp2.migrate.shim.explain import constructor_code, original_class, say, warn
from fsdp2.migrate.shim.units import Ignored, alone, chosen, materialize, own_modules, synchronize


@dataclass
class Unit:
    """What the shim knows of a module that it sharded.

    Attributes:
        is_root: no other call of FSDP wrapped it.
        buffer_dtypes: of the buffers that mixed precision cast, what they were, by their names in the unit.
    """

    arguments: Arguments
    ignored: Ignored
    is_root: bool
    buffer_dtypes: dict[str, torch.dtype]

    @property
    def process_group(self) -> Any:
        """FSDP1's: the ranks that shard; with NO_SHARD, those that have a replica each."""
        mesh = self.arguments.mesh
        whole = self.arguments.sharding_strategy is ShardingStrategy.NO_SHARD
        return mesh.get_group(0 if whole else mesh.ndim - 1)


def unit_of(module: nn.Module) -> Unit | None:
    return module.__dict__.get("_fsdp1")


def shard(model: nn.Module, arguments: Arguments, prepare: Callable[[nn.Module], nn.Module]) -> None:
    """Shard the units of the policy, inner before outer ones, then the model.

    Args:
        prepare: makes a module one of the shim's, before it is sharded.
    """
    arguments.place(model)
    ignored = Ignored(model, arguments)
    names = {module: name for name, module in model.named_modules()}
    changes = chosen(model, arguments, ignored)
    for module in model.modules():
        if (inner := unit_of(module)) is not None:
            inner.is_root = False
    plan: dict[nn.Module, dict[str, Any]] = {}
    synchronized: set[Tensor] = set()
    buffers_cast: list[str] = []
    on_meta = False
    for module in (*changes, model):
        own = _changed(arguments, changes.get(module, {}), module)
        if own.replicas_of_one_rank:
            warn(
                f"{own.sharding_strategy} over shard groups of one rank: FSDP1 makes NO_SHARD within each rank of it, "
                "and the replicas never meet. Here their gradients are averaged, and losses differ from FSDP1's for "
                "that reason"
            )
        in_fp32 = module is not model and isinstance(module, alone(arguments))
        on_meta |= materialize(module, own, ignored)
        buffer_dtypes = {} if in_fp32 else _cast_buffers(module, own, ignored)
        buffers_cast += [f"{names[module]}.{name}".lstrip(".") for name in buffer_dtypes]
        if own.sync_module_states:
            synchronize(module, own.mesh, ignored, synchronized)
        plan[module] = own.fully_shard_arguments(in_fp32=in_fp32) | {"ignored_params": ignored.parameters}
        with optimizers.watching(module):
            fully_shard(prepare(module), **plan[module])
        if not own.use_orig_params:
            optimizers.was_flat(
                module, [p for inner in own_modules(module, ignored) for p in inner.parameters(recurse=False)]
            )
        module._fsdp1 = Unit(own, ignored, module is model, buffer_dtypes)  # type: ignore[assignment]
        if hasattr(module, "set_reduce_scatter_unused_params"):  # from torch 2.15 on
            module.register_forward_pre_hook(_expect_whole_gradient)
        if module is model and own.root_casts:
            module.register_forward_pre_hook(_cast_inputs_of_root, with_kwargs=True)
            plan[model]["mp_policy"] = replace(plan[model]["mp_policy"], cast_forward_inputs=True)
    _schedule(model, arguments)
    what = f"FSDP({original_class(model).__name__}, …)"
    say(what, constructor_code(model, names, plan, arguments, ignored, buffers_cast, on_meta))


def _changed(arguments: Arguments, changes: Mapping[str, Any], module: nn.Module) -> Arguments:
    """What a policy changed for one unit."""
    if not changes:
        return arguments
    try:
        own = replace(arguments, auto_wrap_policy=None, **changes)
    except TypeError as error:
        raise ValueError(f"CustomPolicy: it returned arguments that FSDP doesn't have: {error}") from None
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


def _cast_inputs_of_root(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """FSDP1 casts the inputs of the outermost unit alone. FSDP2 casts those of each call that says so, and whether
    another call will wrap this one isn't known when it is made: so the outermost is found at each forward."""
    unit = unit_of(module)
    assert unit is not None  # the hook is registered on units,
    assert unit.arguments.mixed_precision is not None  # and with mixed precision
    dtype = unit.arguments.mixed_precision.param_dtype
    return (_cast(args, dtype), _cast(kwargs, dtype)) if unit.is_root and dtype is not None else None


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


def require_fine_sums(modules: Iterable[nn.Module]) -> None:
    """Raise Unsupported if microbatches would be added up in a coarser dtype than FSDP1 does it in."""
    for unit in filter(None, map(unit_of, modules)):
        precision = unit.arguments.mixed_precision
        if precision is not None and precision.param_dtype is None and precision.reduce_dtype is not None:
            raise Unsupported(
                f"no_sync() with MixedPrecision(reduce_dtype={precision.reduce_dtype}) and without param_dtype: FSDP2 "
                "adds microbatches up in reduce_dtype, where FSDP1 does it in the parameters'. Drop reduce_dtype"
            )


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

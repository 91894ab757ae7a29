"""The constructor's work: units are sharded, watched for what FSDP2 can't follow, and explained as code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fsdp1_interface import optimizers
from fsdp1_interface.arguments import Arguments, Unsupported
from fsdp1_interface.explain import constructor_code, original_class, say, warn
from fsdp1_interface.shard import Unit as Unit
from fsdp1_interface.shard import shard_units, unit_of
from fsdp1_interface.units import own_modules


def shard(model: nn.Module, arguments: Arguments, prepare: Callable[[nn.Module], nn.Module]) -> None:
    """Shard the policy's units, inner before outer ones, then the model; `prepare` first makes each the shim's."""
    names = {module: name for name, module in model.named_modules()}
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))

    def sharding(module: nn.Module, **options: Any) -> None:
        unit = unit_of(module)
        assert unit is not None  # shard_units has made it one
        if unit.arguments.replicas_of_one_rank:
            warn(
                f"{unit.arguments.sharding_strategy} over shard groups of one rank: FSDP1 makes NO_SHARD within each "
                "rank of it, and the replicas never meet. Here their gradients are averaged, and losses differ from "
                "FSDP1's for that reason"
            )
        fully_shard(prepare(module), **options)
        _named_as_fsdp1(type(module))
        inner = own_modules(module, unit.ignored)
        parameters = dict.fromkeys(p for part in inner for p in part.parameters(recurse=False))
        flat = [parameter for parameter in parameters if parameter not in unit.ignored.parameters]
        for parameter in flat:
            parameter._fsdp_flattened = True  # type: ignore[attr-defined]
        if not unit.arguments.use_orig_params:
            optimizers.was_flat(module, flat)

    with optimizers.watching(model, arguments.use_orig_params):
        plan = shard_units(model, arguments, sharding)
    unit = unit_of(model)
    assert unit is not None
    paths = {module: names[module] for module in plan}
    cast = [f"{paths[module]}.{name}".lstrip(".") for module in plan
            for name in getattr(unit_of(module), "buffer_dtypes", ())]  # fmt: skip
    what = f"FSDP({original_class(model).__name__}, …)"
    say(what, constructor_code(model, names, plan, arguments, unit.ignored, cast, on_meta))


def _named_as_fsdp1(made: type) -> None:
    """Programs ask for FSDP1's class by its name and module: a sharded module's own class, which is made for it alone,
    has those of the class that it was made by."""
    own = next(i for i, cls in enumerate(made.__mro__) if "_fsdp1_original" in cls.__dict__)
    by = made.__mro__[own + 1]
    theirs = FullyShardedDataParallel if by.__module__.startswith(__package__) else by
    made.__name__, made.__qualname__, made.__module__ = theirs.__name__, theirs.__qualname__, theirs.__module__


def require_fine_sums(modules: Iterable[nn.Module]) -> None:
    """Raise Unsupported if microbatches would be added up in a coarser dtype than FSDP1 does it in."""
    for unit in filter(None, map(unit_of, modules)):
        precision = unit.arguments.mixed_precision
        if precision is not None and precision.param_dtype is None and precision.reduce_dtype is not None:
            raise Unsupported(
                f"no_sync() with MixedPrecision(reduce_dtype={precision.reduce_dtype}) and without param_dtype: FSDP2 "
                "adds microbatches up in reduce_dtype, where FSDP1 does it in the parameters'. Drop reduce_dtype"
            )

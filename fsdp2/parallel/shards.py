"""The shards of a model: this rank's part of a tensor, and a line about how a model is sharded."""

from __future__ import annotations

import re
from collections import Counter
from typing import cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def groups_of(model: nn.Module) -> list[FSDPModule]:
    """The modules that `fully_shard` was applied to, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _owns_parameters(group: FSDPModule) -> bool:
    """True if a group has anything to gather. A root may have nothing left: its layers are in groups of their own."""
    module = cast(nn.Module, group)
    inner = [child for child in module.modules() if isinstance(child, FSDPModule) and child is not module]
    taken = {parameter for child in inner for parameter in cast(nn.Module, child).parameters()}
    return any(parameter not in taken for parameter in module.parameters())


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: its shard, or all of a plain one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _names(model: nn.Module) -> str:
    """Name the groups, with those that differ in a number taken together."""
    named = [name for name, module in model.named_modules() if isinstance(module, FSDPModule) and name]
    kinds = Counter(
        re.sub(r"(?<=[._])\d+(?=\.|$)", "*", name.replace("._checkpoint_wrapped_module", "")) for name in named
    )
    names = [f"{name} ×{count}" if count > 1 else name for name, count in kinds.items()]
    rest = ["the rest"] if _owns_parameters(cast(FSDPModule, model)) else []
    return ", ".join(names + rest)


def summary(model: nn.Module) -> str:
    """One line for the header of a run with FSDP2."""
    parameters = list(model.parameters())
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    groups = sum(map(_owns_parameters, groups_of(model)))
    placements = {", ".join(map(repr, p.placements)) for p in sharded}
    return (
        f"{type(model).__name__}, {groups} groups, {len(sharded)} of {len(parameters)} parameters are "
        f"DTensors placed ({' or '.join(sorted(placements))}); groups: {_names(model)}"
    )

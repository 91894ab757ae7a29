"""The blocks of somebody's model: the unit of sharding, recomputation and compilation."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the list of modules that holds most of the model's parameters: its blocks.

    A list inside of another, such as the experts of a block, holds fewer. Lists beside the largest count too if they
    have a tenth of its parameters: an encoder beside a decoder. A model that is a list itself, and has none inside, is
    its own list.

    Raises ValueError if the model has no list of modules with parameters.
    """
    lists = [module for module in model.modules() if isinstance(module, LISTS) and _size(module)]
    if len(lists) > 1 and lists[0] is model:
        del lists[0]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks (nn.ModuleList, nn.ModuleDict or nn.Sequential); "
            "name the modules to shard with --shard-modules"
        )
    largest = max(map(_size, lists))
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for one in lists:  # outer ones come before those inside of them
        if one not in inside and _size(one) * 10 >= largest:
            inside.update(one.modules())
            blocks += [block for block in _called(one) if _size(block) and block not in blocks]
    return blocks


def _called(members: nn.Module) -> list[nn.Module]:
    """The members of a list; those of its members that are lists without a forward, in which nothing is gathered."""
    lists = (nn.ModuleList, nn.ModuleDict)
    return [inner for one in members.children() for inner in (_called(one) if isinstance(one, lists) else [one])]


def named_blocks(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """The modules whose name matches one of the patterns, in the model's order.

    Raises ValueError if a pattern matches none, or if one of them is inside of another.
    """
    names = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{pattern}: no module has such a name; the names are like {', '.join(list(names)[:3])}")
    chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for name in chosen:
        if outer := next((one for one in chosen if name.startswith(f"{one}.")), None):
            raise ValueError(f"{' '.join(patterns)}: matches {name} and {outer}, which contains it; name one of them")
    return [names[name] for name in chosen]

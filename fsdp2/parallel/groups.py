"""Groups: the modules that one `fully_shard` call takes, whose parameters are all-gathered together.

More groups mean a lower peak (one group is whole at a time) and more, smaller collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import nn


def may_be_experts(module: nn.Module) -> bool:
    """Return whether a module is a list of modules alike, with parameters: only its owner knows when it calls which.

    A model's blocks are such a list too, and one of them may be left out as an expert is (LayerDrop). An nn.Sequential
    calls all of its members.
    """
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    kinds = [(type(one), [parameter.shape for parameter in one.parameters()]) for one in module.children()]
    return len(kinds) > 1 and bool(kinds[0][1]) and all(kind == kinds[0] for kind in kinds)


def may_have_experts(model: nn.Module) -> bool:
    """Return whether any module of a model may be a list of experts. Most models have one: their blocks."""
    return any(map(may_be_experts, model.modules()))


def _layers(module: nn.Module) -> list[nn.Module]:
    """The outermost modules at or below `module` that own parameters themselves.

    Not the innermost: nn.MultiheadAttention reads its child's weight without calling the child, whose hooks
    would therefore never gather it. Nor an expert: a group that only some ranks call makes the ranks gather different
    things, so the owner of experts is the layer.
    """
    if any(True for _ in module.parameters(recurse=False)) or any(map(may_be_experts, module.children())):
        return [module]
    return [layer for child in module.children() for layer in _layers(child)]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _outside(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The layers below `module` that are neither in a block nor contain one."""
    found = []
    for child in module.children():
        if child in blocks:
            continue
        inside = set(child.modules())
        if any(block in inside for block in blocks):
            found += _outside(child, blocks)
        elif not may_be_experts(child):
            found += _layers(child)
    return found


def shared_parameters(groups: Sequence[Sequence[nn.Module]]) -> set[nn.Parameter]:
    """Parameters that more than one group uses: they have to be in one group, and the root is there for all."""
    users: dict[nn.Parameter, int] = {}
    for group in groups:
        for parameter in {parameter for module in group for parameter in module.parameters()}:
            users[parameter] = users.get(parameter, 0) + 1
    return {parameter for parameter, count in users.items() if count > 1}


def of_other_dtypes(modules: Sequence[nn.Module], taken: Collection[nn.Parameter] = ()) -> list[nn.Module]:
    """Modules at or below some whose parameters are of one dtype, and not of that which most of all are of.

    A reduce-scatter is of one dtype, so each of them is a group of its own. What is frozen isn't reduced, and may be of
    any dtype.

    Args:
        taken: parameters that don't count, because they are in another group.

    Raises ValueError if a module has parameters of several dtypes itself.
    """
    taken, elements = set(taken), Counter[torch.dtype]()
    everything = {parameter for module in modules for parameter in module.parameters()}
    taken |= {parameter for parameter in everything if not parameter.requires_grad}
    for parameter in everything - taken:
        elements[parameter.dtype] += parameter.numel()
    if len(elements) < 2:
        return []
    most = elements.most_common(1)[0][0]

    def below(module: nn.Module) -> list[nn.Module]:
        dtypes = {parameter.dtype for parameter in module.parameters() if parameter not in taken}
        if dtypes <= {most}:
            return []
        # A list has no forward before which it could be gathered.
        if len(dtypes) == 1 and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return [module]
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype != most and parameter not in taken:
                raise ValueError(
                    f"{type(module).__name__} has parameters of {len(dtypes)} dtypes, and {name} is one of its own; "
                    "put those of each dtype into a module, or make all of them float32"
                )
        return [found for child in module.children() for found in below(child)]

    return [found for module in modules for found in below(module)]


def check_parameters(model: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> None:
    """Raises ValueError, in one line, if `fully_shard` can't take the parameters of a model in these groups."""
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ValueError(f"{', '.join(scalars)} has no dimension to split; make it one of shape (1,)")
    shared = shared_parameters(groups)
    taken = set(shared)
    for group in groups:
        of_other_dtypes(group, taken)
        taken |= {parameter for module in group for parameter in module.parameters()}
    of_other_dtypes([model], taken - shared)


def large_layers(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Layers outside of the blocks with at least as many parameters as the largest block: embedding, head.

    The root's parameters stay gathered from the start of forward to the end of backward. That suits a norm; an
    embedding of a block's size is better gathered for its own forward and backward, as a block is. A layer that shares
    a parameter with another stays with the root: both must be in one group, and such a group is needed at both ends of
    the model, so it would be gathered throughout as well.
    """
    largest = max((_size(block) for block in blocks), default=0)
    layers = _outside(model, blocks)
    users = Counter(id(parameter) for part in [*layers, *blocks] for parameter in part.parameters())
    alone = [layer for layer in layers if all(users[id(parameter)] == 1 for parameter in layer.parameters())]
    return [layer for layer in alone if _size(layer) >= largest > 0]


def shard_groups(model: nn.Module, blocks: Sequence[nn.Module], granularity: int | str = 1) -> list[list[nn.Module]]:
    """Groups of modules in forward order; what is in none of them is left to the root.

    Args:
        blocks: modules of `model`, in forward order. Other layers are taken in the order in which they stand in it.
        granularity: N puts N blocks into a group; `layer` makes each layer of a block a group; `root` makes
            none, so that the whole model is one group. But for `root`, each of `large_layers` is a group too.
    """
    if granularity == "root":
        return []
    if granularity == "layer":
        groups = [[layer] for block in blocks for layer in _layers(block)]
    else:
        assert isinstance(granularity, int)
        groups = [list(blocks[i : i + granularity]) for i in range(0, len(blocks), granularity)]
    index_of = {module: index for index, module in enumerate(model.modules())}
    start = min((index_of[group[0]] for group in groups), default=0)
    large = large_layers(model, blocks)
    before = [[layer] for layer in large if index_of[layer] < start]
    return before + groups + [[layer] for layer in large if index_of[layer] > start]

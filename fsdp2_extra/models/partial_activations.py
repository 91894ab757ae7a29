"""Modules that see a part of their activations where ranks split a model's layers; found on `meta`, alone.

A parameter that is whole on each rank has a whole gradient where its module sees whole activations. Where it sees some
heads alone, as a norm of queries does, or some hidden numbers, as an activation with numbers to learn, the gradient is
a part of a sum; training goes wrong in silence if nobody adds it up. So the model is tried twice, as it is and as a
rank has it, and the shapes that each module is given are compared. Nothing is sent: only shapes are asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def seen_in_part(
    model: nn.Module, cuts: Mapping[str, Mapping[str, int]], ranks: int, fails: Callable[[nn.Module], str | None]
) -> list[str]:
    """Names of modules that are given another shape on one of several ranks than on one alone.

    Args:
        model: on meta; it stays as it is.
        cuts: name of a module -> those of its parameters of which a rank computes with a part -> their dimension.
        fails: tries a forward of a model on meta, which it may use up; why it fails, if it does.

    Raises ValueError, in a line, if a rank's part can't be computed: the model's code counts on all heads.
    """
    part, whole = copy.deepcopy(model), copy.deepcopy(model)
    for name, dims in cuts.items():
        module = part.get_submodule(name)
        for own, dim in dims.items():
            module._parameters[own] = nn.Parameter(module.get_parameter(own).detach().chunk(ranks, dim)[0])
    seen = []
    for tried in (part, whole):
        shapes: dict[str, list[Any]] = {}
        for name, module in tried.named_modules():
            module.register_forward_pre_hook(partial(_note, shapes, name), with_kwargs=True)
        if why := fails(tried):
            raise ValueError(f"a rank can't compute with its part of each layer ({why})")
        seen.append(shapes)
    given, alone = seen
    return [name for name, shape in given.items() if shape != alone.get(name, shape)]


def _note(shapes: dict[str, list[Any]], name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
    shapes.setdefault(name, [one.shape for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)])

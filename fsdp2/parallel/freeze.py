"""Freezing: parameters that are not trained, by the pattern of their names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Switch off the gradients of the parameters whose name matches one of the patterns.

    Raises ValueError if a pattern matches nothing, or if nothing is left to train.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names.values()):
            continue
        for other, parameter in model.named_parameters(remove_duplicate=False):
            if fnmatchcase(other, pattern):
                raise ValueError(f"{pattern}: {other} is tied to {names[parameter]}; name that, which freezes both")
        like = next(iter(names.values()))
        raise ValueError(f"{pattern}: no parameter of the model has such a name; the names are like {like}")
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"{' '.join(patterns)}: would freeze every parameter and leave nothing to train")

"""`--model package.module:function`: a model that a function of one's own makes."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2.models.blocks import find_blocks
from fsdp2.models.meta import parameters_on_meta
from fsdp2.models.spec import ModelSpec


def spec(name: str) -> ModelSpec:
    """What the function returns if that is a ModelSpec; else a specification of the module that it returns.

    A module alone is taken to classify images: it gets (N, 1, 28, 28) and gives (N, classes). It is initialised as
    the function does it. Raises ValueError, in one line, for a function that can't be used.
    """
    function = _function(name)
    try:
        with parameters_on_meta():
            made = function()
    except Exception as error:  # whatever a stranger's code raises
        raise ValueError(f"it raised {type(error).__name__} ({' '.join(str(error).split())[:160]})") from error
    if isinstance(made, ModelSpec):
        return dataclasses.replace(made, name=name)
    if not isinstance(made, nn.Module):
        raise ValueError(f"it returned a {type(made).__name__}; it has to return an nn.Module or a ModelSpec")
    return ModelSpec(name, "image", {"own": {}}, function, find_blocks, {}, loss)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise TypeError(f"the model gave {shape} where (N, classes) was expected; return a ModelSpec that has its loss")
    return F.cross_entropy(outputs.float(), targets, reduction="sum")


def _function(name: str) -> Callable[[], Any]:
    module_name, _, function_name = name.partition(":")
    # As `python -m` does it; torchrun and Ray start a worker without the current folder.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"{module_name} can't be imported ({type(error).__name__}: {error})") from error
    function = getattr(module, function_name, None)
    if function is None:
        raise ValueError(f"{module_name} has no {function_name}")
    if not callable(function):
        raise ValueError(f"{function_name} is a {type(function).__name__}; give a function without arguments")
    return function

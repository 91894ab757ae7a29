"""`--model package.module:function`: a model that a function of one's own makes."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2.models.initial import fill_for
from fsdp2.models.meta import parameters_on_meta
from fsdp2.models.names import BY_TORCH
from fsdp2.models.spec import ModelSpec
from fsdp2_extra.models.blocks import find_blocks

KINDS = {"image": ("causal",), "language": ("causal", "masked", "seq2seq")}  # and what a model of each may learn


def spec(name: str) -> ModelSpec:
    """Call the function: its ModelSpec, or a specification of the module that it returns.

    A module alone is taken to classify images: it gets (N, 1, 28, 28) and gives (N, classes). It is initialised as
    the function does it. Raises ValueError, in one line, for a function that can't be used, and so do `make` and
    `blocks` of what it returns.
    """
    function = _function(name)
    with parameters_on_meta():
        made = _called(function, "it")
    seen: dict[Any, Any] = {}  # numbers of a size -> what its model was made of
    if isinstance(made, nn.Module):
        seen["own"] = _made_of(made)
        made = ModelSpec(name, "image", {"own": {}}, function, find_blocks, {}, loss, attentions=BY_TORCH)
    elif not isinstance(made, ModelSpec):
        raise ValueError(f"it returned a {type(made).__name__}; it has to return an nn.Module or a ModelSpec")
    if made.kind not in KINDS or made.task not in KINDS[made.kind]:
        kinds = " or ".join(f"{kind} ({', '.join(tasks)})" for kind, tasks in KINDS.items())
        raise ValueError(f"its ModelSpec is of kind {made.kind!r}, task {made.task!r}; there is {kinds}")
    if not made.sizes:
        raise ValueError("its ModelSpec has no sizes; name one at least")
    if made.task != "causal" and made.special_token is None:
        raise ValueError(f"its ModelSpec has no special_token, which the task {made.task} needs")
    return dataclasses.replace(made, name=name, make=_checked_make(made, seen), blocks=_checked_blocks(made.blocks))


def _called(function: Callable[..., Any], what: str, *arguments: Any, **named: Any) -> Any:
    try:
        return function(*arguments, **named)
    except (Exception, SystemExit) as error:  # whatever a stranger's code raises
        why = f"{what} raised {type(error).__name__} ({' '.join(str(error).split())[:160]})"
        raise ValueError(why) from error


def _made_of(model: nn.Module) -> list[Any]:
    return [(name, one.shape, one.dtype) for name, one in chain(model.named_parameters(), model.named_buffers())]


def _checked_make(made: ModelSpec, seen: dict[Any, Any]) -> Callable[..., nn.Module]:
    def make(**numbers: Any) -> nn.Module:
        model = _called(made.make, "its make", **numbers)
        if not isinstance(model, nn.Module):
            raise ValueError(f"its make returned a {type(model).__name__}, and no nn.Module")
        parts = _made_of(model)
        if seen.setdefault(repr(numbers) if numbers else "own", parts) != parts:
            raise ValueError("it made a different model the second time; a run makes several, and they must be equal")
        if made.initial_values:
            for name, _ in chain(model.named_parameters(), model.named_buffers()):
                _called(fill_for, "its table of initial values", made.initial_values, name)
        return model

    return make


def _checked_blocks(blocks: Callable[[Any], Sequence[nn.Module]]) -> Callable[[Any], Sequence[nn.Module]]:
    def checked(model: nn.Module) -> Sequence[nn.Module]:
        if blocks is find_blocks:
            return find_blocks(model)  # its reasons read on by themselves
        found = _called(lambda: list(blocks(model)), "its blocks")
        members = {module: name for name, module in model.named_modules() if name}
        if any(not isinstance(one, nn.Module) or one not in members for one in found):
            raise ValueError("its blocks are not all modules of the model")
        inside = [part for one in set(found) for part in one.modules()]
        if len(set(found)) < len(found) or len(set(inside)) < len(inside):
            raise ValueError("its blocks hold a module twice: one is inside of another, or named two times")
        return found

    return checked


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross-entropies, 0-d fp32, of (N, classes) logits. Raises TypeError for other outputs."""
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
    except (Exception, SystemExit) as error:
        raise ValueError(f"{module_name} can't be imported ({type(error).__name__}: {error})") from error
    function = getattr(module, function_name, None)
    if function is None:
        raise ValueError(f"{module_name} has no {function_name}")
    if not callable(function):
        raise ValueError(f"{function_name} is a {type(function).__name__}; give a function without arguments")
    return function

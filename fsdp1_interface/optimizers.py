"""Optimizers that were made before FSDP, and those that FSDP2 can't follow.

FSDP1 keeps the parameters of a model that is sharded with use_orig_params=True, FSDP2 replaces them: an optimizer that
holds them gets the new ones. With use_orig_params=False, and where an optimizer treats parameters of a unit differently
that were one flat parameter in FSDP1, it would train on without an error: its first step raises.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp1_interface.arguments import Unsupported
from fsdp1_interface.explain import original_class

_replaced: dict[int, weakref.ref[nn.Parameter]] = {}
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@dataclass(eq=False)
class Flat:
    """The parameters of a unit that were one in FSDP1: what the unit is, and how many of them are trained."""

    unit: str
    count: int


@contextlib.contextmanager
def watching(module: nn.Module, follow: bool) -> Iterator[None]:
    """Optimizers that hold parameters of `module` which are others afterwards get those, or are refused."""
    before = dict(module.named_parameters())
    yield
    after = dict(module.named_parameters())
    moved = {old: after[name] for name, old in before.items() if name in after and after[name] is not old}
    if follow:
        _follow(moved)
        return
    if not _replaced:
        register_optimizer_step_pre_hook(_refuse)
    for old in moved:
        _replaced[id(old)] = weakref.ref(old, partial(_forget, id(old)))


def _follow(moved: dict[nn.Parameter, nn.Parameter]) -> None:
    # Torch keeps no list of optimizers, and one may be used before its first step: by a scaler.
    for optimizer in [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]:
        held = [p for group in optimizer.param_groups for p in group["params"] if p in moved]
        if any(optimizer.state.get(parameter) for parameter in held):
            raise Unsupported(
                f"{type(optimizer).__name__} has stepped before FSDP: its state is of whole parameters. Shard the "
                "model before the first step"
            )
        for group in optimizer.param_groups if held else ():
            group["params"] = [moved.get(parameter, parameter) for parameter in group["params"]]


def was_flat(unit: nn.Module, parameters: list[nn.Parameter]) -> None:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    flat = Flat(original_class(unit).__name__, len(trained))
    for parameter in trained:
        parameter._fsdp1_flat = flat  # type: ignore[attr-defined]


def _forget(key: int, _: object) -> None:
    _replaced.pop(key, None)  # its memory, and with it its id, may become another parameter's


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _checked:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        known = _replaced.get(id(parameter))
        if known is not None and known() is parameter:
            raise RuntimeError(
                f"{type(optimizer).__name__} was made before FSDP: FSDP2 replaces parameters, so that it would "
                "train tensors that the model no longer has. Make it after the model is sharded, of "
                "model.parameters()"
            )
    _require_whole_units(optimizer)
    _checked.add(optimizer)


def _require_whole_units(optimizer: Optimizer) -> None:
    held: dict[Flat, list[dict[str, Any]]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            if (flat := getattr(parameter, "_fsdp1_flat", None)) is not None and parameter.requires_grad:
                held.setdefault(flat, []).append(options)
    for flat, groups in held.items():
        if len(groups) < flat.count or any(options != groups[0] for options in groups):
            raise Unsupported(
                f"{type(optimizer).__name__} has {len(groups)} of the {flat.count} parameters of a unit {flat.unit}, "
                "or groups with different options for them. With use_orig_params=False, FSDP's default, they were one "
                "flat parameter, of one dimension, in one group. Give them one group, or set use_orig_params=True"
            )

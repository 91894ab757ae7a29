"""The settings of an optimizer that a checkpoint brings, and whether they can be."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from fsdp2.checkpoint.state import HOW


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """How the optimizer updates, but for the rate, which is the schedule's, and for how it computes."""
    beside = ("params", "lr", "initial_lr", *HOW)
    groups = enumerate(optimizer.param_groups)
    found = {(name, number): group[name] for number, group in groups for name in group if name not in beside}
    found = {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
    several = len(optimizer.param_groups) > 1
    return {f"{name} of group {number}" if several else name: value for (name, number), value in found.items()}


def require_possible(optimizer: torch.optim.Optimizer, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ValueError for settings that torch refuses where it makes an optimizer, or that need other state."""
    makes = type(optimizer)
    known = inspect.signature(makes).parameters.keys() - {"params", *HOW}
    try:
        for group in optimizer.param_groups if makes.__module__.startswith("torch.optim.") else ():
            float(sum(value for value in group.values() if isinstance(value, int)))  # else it fails in the first step
            makes([torch.zeros(1)], **{name: group[name] for name in known & group.keys()})
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"an optimizer with its settings can't be made ({error})") from None
    if wrong := [name for name in ours if name.startswith("amsgrad") and theirs[name] != ours[name]]:
        raise ValueError(f"its optimizer has {wrong[0]} {theirs[wrong[0]]}, and no state for that")

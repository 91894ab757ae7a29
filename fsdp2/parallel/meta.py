"""From `meta` to memory: allocate a model, and check that every tensor of it got its initial value.

Source: https://docs.pytorch.org/docs/stable/meta.html
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp2.parallel.shards import local


def allocate(model: nn.Module, device: torch.device, *, cpu_offload: bool = False) -> None:
    """Give a model on meta its memory; with offload, parameters on the CPU and buffers where they are used.

    What was on meta is NaN wherever its dtype has it, so that what nobody sets is recognised. Buffers that have their
    values already keep them. What modules share, they share afterwards.
    """
    values = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if not buffer.is_meta}
    tied = [names for names in shared_names(model) if len(names) > 1]
    model.to_empty(device="cpu" if cpu_offload else device)
    share(model, tied)
    poison(model)
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        _set(model, name, values[name].to(device) if name in values else buffer.to(device))


def shared_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter, of which one that modules share has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def share(model: nn.Module, names: Iterable[Sequence[str]]) -> None:
    """Let modules have one parameter in common again, by the groups of names that `shared_names` gave."""
    for first, *others in names:
        for name in others:
            _set(model, name, _get(model, first))


def _get(model: nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path)._parameters[last]  # as an attribute it may be what a module computes with


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, tensor)


def poison(model: nn.Module) -> None:
    """Make the garbage that to_empty leaves recognisable: NaN wherever a dtype has it."""
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            if tensor.is_floating_point() or tensor.is_complex():
                local(tensor).fill_(math.nan)


def check_initialised(model: nn.Module, *, brought: Callable[[str], bool] = lambda name: False) -> None:
    """Raise RuntimeError, naming them, if parameters or buffers are on meta or still hold a NaN of `poison`.

    `brought` says what something else will set, by its name in the state dict.
    """
    left_out = {name for name in model.state_dict() if brought(name)}
    named = [
        (name, tensor)
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers())
        if name not in left_out
    ]
    on_meta = [name for name, tensor in named if tensor.is_meta]
    if on_meta:
        raise RuntimeError(f"{len(on_meta)} tensors were left on meta: {', '.join(on_meta)}")
    unset = [name for name, tensor in named if local(tensor).isnan().any()]  # integers have no NaN and pass
    if unset:
        raise RuntimeError(f"{len(unset)} of {len(named)} tensors were not initialised: {', '.join(unset)}")

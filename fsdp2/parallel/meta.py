"""From `meta` to memory: allocate a model, and check that every tensor of it got its initial value."""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn

from fsdp2.parallel.inspect import local


def allocate(model: nn.Module, device: torch.device, *, cpu_offload: bool) -> None:
    """Give a model on meta its memory; with offload, parameters on the CPU and buffers where they are used."""
    model.to_empty(device="cpu" if cpu_offload else device)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device=device))


def poison(model: nn.Module) -> None:
    """Make the garbage that to_empty leaves recognisable: NaN wherever a dtype has it."""
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            if tensor.is_floating_point() or tensor.is_complex():
                local(tensor).fill_(math.nan)


def check_initialised(model: nn.Module, *, saved: bool = True) -> None:
    """Raise RuntimeError, naming them, if parameters or buffers are on meta or still hold a NaN of `poison`.

    `saved=False` leaves out what is in the state dict, for a checkpoint to set.
    """
    left_out = set() if saved else set(model.state_dict())
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

"""Optimizers over the local shards, with their state in place before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

OPTIMIZERS: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adadelta": torch.optim.Adadelta,
    "sgd": torch.optim.SGD,
}


# Adadelta has no fused form; SGD's can't take DTensors: torch has no sharding rule for aten._fused_sgd_.
FUSED = ("adam", "adamw")


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], lr: float, *, fused: bool | None = None, materialised: bool = True
) -> torch.optim.Optimizer:
    """An optimizer for the parameters that require a gradient, its state materialised at step 0 if asked.

    With `fused=None`, fused on a GPU where the optimizer has it; elsewhere foreach. On the CPU foreach and not fused:
    the fused kernels round differently, and offloaded parameters shall train to the same losses as others.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if fused is None:
        fused = name in FUSED and all(parameter.device.type == "cuda" for parameter in trained)
    options: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    if name == "sgd":
        options["momentum"] = 0.9
    optimizer = OPTIMIZERS[name](trained, lr=lr, **options)
    if materialised:
        _materialise(optimizer)
    return optimizer


def _materialise(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state as it is before any step.

    A checkpoint can only be restored into state that exists; with none, `optimizer.state_dict()` has no keys
    and a load that finds nothing to fill succeeds. A step with zero gradients and zero learning rate
    creates it and changes no parameter; the step counters go back to 0 afterwards.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()

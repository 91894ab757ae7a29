"""Optimizers over the local shards, with their state in place before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fsdp2.parallel import FUSED

CLASSES: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adadelta": torch.optim.Adadelta,
    "sgd": torch.optim.SGD,
}

Options = Any
"""An object with the flags as attributes, such as `fsdp2.config.Config`, which this room doesn't import."""


def make_optimizer(
    options: Options, parameters: Iterable[nn.Parameter], *, materialised: bool = True
) -> torch.optim.Optimizer:
    """An optimizer for the parameters that require a gradient, its state materialised at step 0 if asked.

    Of sharded parameters the state is sharded likewise, in their dtype unless the options say which. Without a
    collective.

    A weight decay that was asked for counts for parameters of two dimensions or more: pulled to zero, norms and biases
    would lose what they are for.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    settings: dict[str, Any] = {} if options.betas is None else {"betas": options.betas}
    groups: list[Any] = trained
    if options.weight_decay is not None:
        wide = [parameter for parameter in trained if parameter.dim() > 1]
        thin = [parameter for parameter in trained if parameter.dim() <= 1]
        decays = ((wide, options.weight_decay), (thin, 0.0))
        groups = [{"params": group, "weight_decay": decay} for group, decay in decays if group]
    if options.optimizer_state is not None:
        # Imported here: torchao is an extra.
        from fsdp2_extra.low_precision.low_bit import LowBitAdam

        settings |= {"moments": options.optimizer_state, "decoupled": options.optimizer == "adamw"}
        if settings["decoupled"] and options.weight_decay is None:
            settings["weight_decay"] = 0.01  # torch's AdamW's
        low_bit = LowBitAdam(groups, lr=options.lr, compiled=options.compile, **settings)
        if materialised:
            _materialise(low_bit)
        return low_bit
    return plain_optimizer(
        options.optimizer, groups, options.lr, fused=options.fused_optimizer, materialised=materialised, **settings
    )


def plain_optimizer(
    name: str,
    groups: Iterable[Any],
    lr: float,
    *,
    fused: bool | None = None,
    materialised: bool = True,
    **settings: Any,
) -> torch.optim.Optimizer:
    """An optimizer by its name, with further settings of its own, of groups or of the parameters that are trained.

    With `fused=None`, fused on a GPU where the optimizer has it; elsewhere foreach. On the CPU foreach and not fused:
    the fused kernels round differently, and offloaded parameters train to the same losses as others.
    """
    groups = [group for group in groups if isinstance(group, dict) or group.requires_grad]
    trained = [p for group in groups for p in (group["params"] if isinstance(group, dict) else [group])]
    if fused is None:
        fused = name in FUSED and all(parameter.device.type == "cuda" for parameter in trained)
    settings |= {"fused": True} if fused else {"foreach": True}
    if name == "sgd":
        settings["momentum"] = 0.9
    optimizer: torch.optim.Optimizer = CLASSES[name](groups, lr=lr, **settings)
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

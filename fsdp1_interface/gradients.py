"""zero_grad() as FSDP1 has it: it clears all gradients, whether parameters are gathered or not.

Left alone, FSDP2 keeps two kinds. While a group is gathered, as the outermost one is from its forward to its backward
and after an evaluation, `model.parameters()` are the gathered parameters: the gradients of the shards stay. And what
microbatches under no_sync() have summed up stays until a backward reduces it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, ShardingStrategy
from torch.optim import Optimizer

from fsdp1_interface.arguments import Arguments
from fsdp1_interface.explain import warn
from fsdp1_interface.sharding import unit_of

_summing: weakref.WeakSet[nn.Module] = weakref.WeakSet()
KEPT = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


def clear(model: nn.Module, set_to_none: bool) -> None:
    """Those of the shards, and those that aren't reduced yet. Local: no rank waits for another."""
    shown = {id(parameter) for parameter in model.parameters()}
    for module in model.modules():
        held = [own.sharded_param for own in parameters_of(module) if own.sharded_param.grad is not None]
        if any(id(parameter) not in shown for parameter in held) and (unit := unit_of(module)) is not None:
            _say_what_fsdp1_does(unit.arguments)
        for parameter in held:
            parameter.grad = None if set_to_none else parameter.grad.detach().zero_()
    _forget_unreduced(model)


def _say_what_fsdp1_does(arguments: Arguments) -> None:
    if arguments.use_orig_params and arguments.sharding_strategy in KEPT:
        warn(
            "zero_grad() of a model whose parameters are gathered: between forward and backward FSDP1 clears nothing "
            "with SHARD_GRAD_OP and use_orig_params=True, so that each gradient is added to those of all steps before. "
            "Here they are cleared, and losses differ from FSDP1's for that reason"
        )


def sums(model: nn.Module) -> None:
    """Say that a model is in no_sync(): from now on zero_grad() of an optimizer forgets what it has summed up."""
    _summing.add(model)
    if not hasattr(Optimizer.zero_grad, "_fsdp1"):
        Optimizer.zero_grad = _forgetting(Optimizer.zero_grad)  # type: ignore[method-assign]


def _forgetting(zero_grad: Any) -> Any:
    # Optimizers have hooks around step() and none around zero_grad().
    @functools.wraps(zero_grad)
    def both(self: Optimizer, set_to_none: bool = True) -> None:
        zero_grad(self, set_to_none)
        own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        for model in tuple(_summing):
            _forget_unreduced(model, own)

    both._fsdp1 = True  # type: ignore[attr-defined]
    return both


def _forget_unreduced(model: nn.Module, wanted: set[int] | None = None) -> None:
    for module in model.modules():
        for own in parameters_of(module):
            if wanted is None or id(own.sharded_param) in wanted:
                if (whole := getattr(own, "_unsharded_param", None)) is not None:
                    whole.grad = None
                if "unsharded_accumulated_grad" in vars(own):  # up to torch 2.14
                    own.unsharded_accumulated_grad = None


def parameters_of(module: nn.Module) -> Iterator[Any]:
    """torch's records of a group's parameters, which know both forms of each. There is no public way to the form that
    isn't in use, and to bring it into use is a collective call, which zero_grad() mustn't be
    (`tests/migrate/test_shim_gradients.py`)."""
    if isinstance(module, FSDPModule):
        state = module._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
            yield from group.fsdp_params

"""Experts: modules alike of which a rank's tokens may choose some, and leave the others without a gradient.

FSDP2 exchanges the gradients that a group has. Where an expert has one on some ranks alone, these send more than the
others: on CPUs the processes die, and GPUs wait for ever or add up gradients of different weights. So an expert that no
token of a rank has chosen has to send zeros.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fsdp2.parallel.groups import may_be_experts
from fsdp2.parallel.shards import local


def experts_in(module: nn.Module, apart: Collection[nn.Module] = ()) -> Iterator[nn.Module]:
    """The lists of experts inside of a module, but not those inside of the modules `apart`, which are other groups."""
    for child in module.children():
        if child not in apart:
            if may_be_experts(child):
                yield child
            else:
                yield from experts_in(child, apart)


Owned = list[tuple[nn.Module, str]]
"""Parameters as owner and name: as attributes of their owners they are sharded or gathered, whichever the group is."""


def groups_with_experts(model: nn.Module) -> Iterator[tuple[nn.Module, Owned, Owned]]:
    """Each group that `fully_shard` has made with experts in it: trained parameters of the experts, and all trained."""
    for group in model.modules():
        if isinstance(group, FSDPModule):
            apart = [one for one in group.modules() if isinstance(one, FSDPModule) and one is not group]
            others = {parameter for module in apart for parameter in module.parameters()}
            experts = [one for module in experts_in(group, apart) for one in _trained(module, others)]
            if experts:
                yield group, experts, _trained(group, others)


def _trained(module: nn.Module, others: Collection[nn.Parameter]) -> Owned:
    return [
        (owner, name)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if parameter.requires_grad and parameter not in others
    ]


def exchange_zeros(model: nn.Module) -> None:
    """Let the groups of a sharded model exchange zeros for experts that weren't called."""
    for group, experts, _ in groups_with_experts(model):
        if hasattr(group, "set_reduce_scatter_unused_params"):  # torch 2.15
            cast(FSDPModule, group).set_reduce_scatter_unused_params(True, recurse=False)
        else:
            # Before FSDP2's own hook, which frees the group.
            group.register_forward_hook(partial(_touch, experts), prepend=True)


class Unchosen:
    """Takes the zeros back where no rank had anything else.

    An optimizer leaves a parameter without a gradient alone. With zeros Adam would go on moving it, by the average of
    earlier gradients, and weight decay would shrink it: one process does neither.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owned = [one for _, _, trained in groups_with_experts(model) for one in trained]
        self._called: set[nn.Module] = set()
        for owner in dict.fromkeys(owner for owner, _ in self._owned):
            owner.register_forward_hook(torch.compiler.disable(self._note))

    def _note(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            self._called.add(module)

    @torch.no_grad()
    def drop(self) -> None:
        """To be called between backward and the optimizer's step. A collective call if there are experts."""
        if not self._owned:
            return
        parameters = [getattr(owner, name) for owner, name in self._owned]
        # What isn't called may be read by another module. Then it has a gradient all the same.
        used = [
            owner in self._called or (parameter.grad is not None and bool(local(parameter.grad).any()))
            for (owner, _), parameter in zip(self._owned, parameters, strict=True)
        ]
        self._called.clear()
        ranks = torch.tensor(used, dtype=torch.float32, device=parameters[0].device_mesh.device_type)
        dist.all_reduce(ranks)
        if not all(used):  # a rank that has used all needn't wait for the answer
            for parameter, count in zip(parameters, ranks.tolist(), strict=True):
                if count == 0:
                    parameter.grad = None


class _Touch(torch.autograd.Function):
    """Tensors as they are, and for each of some parameters a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Any:
        ctx.like = [(one.shape, one.dtype, one.device) for one in tensors[count:]]
        ctx.set_materialize_grads(False)
        return tuple(one.view_as(one) for one in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *gradients, *(torch.zeros(shape, dtype=dtype, device=at) for shape, dtype, at in ctx.like)


def _touch(experts: Owned, module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """A forward hook that gives parameters a gradient of zeros."""
    if not torch.is_grad_enabled():
        return outputs
    found = list(_tensors(outputs))
    touched = _Touch.apply(len(found), *found, *(getattr(owner, name) for owner, name in experts))
    return _replaced(outputs, iter(touched))


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor) and outputs.requires_grad:
        yield outputs
    elif isinstance(outputs, (tuple, list, Mapping)):
        for one in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from _tensors(one)


def _replaced(outputs: Any, by: Iterator[Tensor]) -> Any:
    """The same outputs with other tensors in the places, and in the order, of `_tensors`."""
    if isinstance(outputs, Tensor):
        return next(by) if outputs.requires_grad else outputs
    if isinstance(outputs, Mapping):
        changed: Any = copy.copy(outputs)  # such as transformers' outputs, a dict with attributes
        for name, one in outputs.items():
            changed[name] = _replaced(one, by)
        return changed
    if isinstance(outputs, (tuple, list)):
        members = [_replaced(one, by) for one in outputs]
        return type(outputs)(*members) if hasattr(outputs, "_fields") else type(outputs)(members)
    return outputs

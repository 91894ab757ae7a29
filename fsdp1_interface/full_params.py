"""`summon_full_params`: whole parameters for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp1_interface.shard import reshard_all
from fsdp1_interface.sharding import unit_of
from fsdp1_interface.states import first_rank, require_own, shard_like


@contextlib.contextmanager
def full_params(
    root: nn.Module,
    owners: Iterable[nn.Module],
    *,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    grads: bool,
) -> Iterator[None]:
    """Put whole parameters, plain tensors in the dtype of the shards, where the sharded ones are. Collective.

    Not by `unshard()`: that gives what forward computes with, in the low precision of its policy.

    Args:
        owners: the modules whose own parameters are meant.
        writeback: whether changes are kept, each rank's in its own shard.
        rank0_only: other ranks have their own shards, as plain tensors.

    Raises ValueError for `writeback` with `rank0_only`: the others would have nothing to write.
    """
    if writeback and rank0_only:
        raise ValueError("summon_full_params: writeback=True with rank0_only=True; other ranks have nothing to write")
    require_own(root)
    unit = unit_of(root)
    keep = not rank0_only or unit is None or first_rank(unit)
    reshard_all(root)
    held: list[tuple[nn.Module, str, Any, nn.Parameter]] = []
    whole_of: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay one
    for owner in owners:
        for name, sharded in list(owner.named_parameters(recurse=False)):
            if not isinstance(sharded, DTensor):
                continue
            if sharded not in whole_of:
                whole = _whole(sharded, offload_to_cpu, grads)
                # Where it isn't kept it is this rank's shard, plain: what a rank does alone mustn't be collective.
                shard = nn.Parameter(sharded.to_local().detach(), sharded.requires_grad)
                whole_of[sharded] = whole if keep else shard
            held.append((owner, name, sharded, whole_of[sharded]))
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    owners_held = {owner for owner, *_ in held}
    # The outermost first, which may hold none of them itself.
    hooks = [_without_hooks(unit) for unit in units if owners_held & set(unit.modules())]
    try:
        for owner, name, _, whole in held:
            owner.register_parameter(name, whole)
        del whole_of
        yield
    finally:
        for put_back in hooks:
            put_back()
        for owner, name, sharded, whole in held:
            owner.register_parameter(name, sharded)
            if writeback:
                _write(sharded, whole, grads)


def _without_hooks(unit: FSDPModule) -> Callable[[], None]:
    """Let a unit compute with what its parameters are now, as FSDP1's inner modules do: FSDP2's hooks would gather its
    shards over them. There is no public way to leave them out (`tests/migrate/test_shim_full_params.py`)."""
    assert isinstance(unit, nn.Module)
    known, state = unit_of(unit), unit._get_fsdp_state()
    if known is not None and known.is_root:
        state._lazy_init()  # else units below it would take themselves for the outermost one
    hooks = (
        (unit._forward_pre_hooks, state._pre_forward_hook_handle.id),
        (unit._forward_hooks, state._post_forward_hook_handle.id),
    )
    own = [held[number] for held, number in hooks]

    def put(some: list[Any], summoned: bool) -> None:
        for (held, number), hook in zip(hooks, some, strict=True):
            held[number] = hook  # in its place: the order decides what other hooks meet
        if known is not None:
            known.summoned = summoned

    put([lambda *_: None] * len(own), True)
    return lambda: put(own, False)


@torch.no_grad()
def _whole(sharded: DTensor, offload_to_cpu: bool, grads: bool) -> nn.Parameter:
    def gathered(value: DTensor) -> torch.Tensor:
        full = value.full_tensor().detach()
        # On a mesh of one rank it is the shard itself, which a change would reach without writeback.
        full = full.clone() if value.device_mesh.size() == 1 or value.to_local().shape == full.shape else full
        return full.cpu() if offload_to_cpu else full

    whole = nn.Parameter(gathered(sharded), requires_grad=sharded.requires_grad)
    if grads and isinstance(sharded.grad, DTensor):
        whole.grad = gathered(sharded.grad)
    return whole


@torch.no_grad()
def _write(sharded: DTensor, whole: nn.Parameter, grads: bool) -> None:
    sharded.to_local().copy_(shard_like(whole.detach(), sharded).to_local())
    if grads and whole.grad is not None and isinstance(sharded.grad, DTensor):
        sharded.grad.to_local().copy_(shard_like(whole.grad, sharded).to_local())

"""Functions that a rewritten program may get. `helpers.py` puts their source, without annotations, behind its imports.

What follows two underscores in a name says which form of a function it is, and isn't in the program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def shard_by_size(module: Any, min_num_params: int, first: Any = None, is_root: bool = True, **options: Any) -> int:
    """Shard what FSDP1's size_based_auto_wrap_policy chose; returns how many parameters are in groups."""
    numel = sum(parameter.numel() for parameter in module.parameters())
    if numel < min_num_params or isinstance(module, torch.nn.MultiheadAttention):
        return 0
    taken = sum(shard_by_size(child, min_num_params, first, False, **options) for child in module.children())
    if is_root or numel - taken < min_num_params or isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        return taken
    if first is not None:
        first(module)
    fully_shard(module, **options)
    return numel


def shard_by_policy(module: Any, policy: Any, first: Any = None, is_root: bool = True, **options: Any) -> int:
    """Shard what an FSDP1 wrapping policy chooses, inner modules first; returns how many parameters are in groups."""
    numel = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    taken = sum(shard_by_policy(child, policy, first, False, **options) for child in module.children())
    if is_root or not policy(module=module, recurse=False, nonwrapped_numel=numel - taken):
        return taken
    if first is not None:
        first(module)
    fully_shard(module, **options)
    return numel


def wrap_by_size(module: Any, recurse: bool, nonwrapped_numel: int, min_num_params: int = int(1e8)) -> bool:
    """FSDP1's size_based_auto_wrap_policy: a group for so many parameters that are in no inner group."""
    never = torch.nn.MultiheadAttention if recurse else (torch.nn.ModuleList, torch.nn.ModuleDict)
    return nonwrapped_numel >= min_num_params and not isinstance(module, never)


def wrap_by_class(module: Any, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Iterable[type]) -> bool:
    """FSDP1's transformer_auto_wrap_policy: a group for each module of these classes."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def wrap_by_function(module: Any, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[Any], bool]) -> bool:
    """FSDP1's lambda_auto_wrap_policy: a group for each module for which the function returns True."""
    return recurse or lambda_fn(module)


def wrap_by_any(module: Any, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]) -> bool:
    """FSDP1's _or_policy: a group for each module that one of the policies chooses."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


def wrap_always(module: Any, recurse: bool, nonwrapped_numel: int) -> bool:
    """FSDP1's always_wrap_policy: a group for each module that has parameters of its own."""
    return recurse or any(True for _ in module.parameters(recurse=False))


def local_shard(tensor: Any) -> Any:
    """This rank's part of a tensor, as FSDP1's parameters and gradients were."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextlib.contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """Gradients are summed up on each rank, and not reduced, while this is open."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


@contextlib.contextmanager
def no_sync__or_ddp(model: Any) -> Iterator[None]:
    """Gradients are summed up on each rank, and not reduced, while this is open."""
    if not isinstance(model, FSDPModule):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


@contextlib.contextmanager
def full_params(model: Any) -> Iterator[None]:
    """Whole parameters while this is open, on every rank, to be read: what is written to them is lost."""
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for group in groups:
        group.unshard()
    try:
        yield
    finally:
        for group in groups:
            group.reshard()


@contextlib.contextmanager
def full_params__own_dtype(model: Any) -> Iterator[None]:
    """Whole parameters in their own dtype while this is open, on every rank, to be read: what is written is lost."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # evaluation leaves groups gathered, in the dtype of mixed precision
    sharded = [(module, *item) for module in model.modules() for item in module.named_parameters(recurse=False)]
    parameters = {id(p): p for _, _, p in sharded if hasattr(p, "full_tensor")}
    whole = {key: torch.nn.Parameter(p.full_tensor(), p.requires_grad) for key, p in parameters.items()}
    for module, name, parameter in sharded:
        setattr(module, name, whole.get(id(parameter), parameter))
    try:
        yield
    finally:
        for module, name, parameter in sharded:
            setattr(module, name, parameter)


def inner_first(module: Any) -> list[Any]:
    """All modules below one, children before their parents: the order in which FSDP1 wrapped them."""
    found = []
    for child in module.children():
        found += [*inner_first(child), child]
    return list(dict.fromkeys(found))


@torch.no_grad()
def initialise(group: Any, device: Any, init: Any = None, sync: bool = False) -> None:
    """Memory and values for what is on the meta device in a group that is to be sharded, as FSDP1 gave them; with
    `sync`, FSDP1's sync_module_states, every rank then gets the values of rank 0."""
    modules = [group]
    for module in modules:
        modules += [c for c in module.children() if not isinstance(c, FSDPModule) and c not in modules]
    tensors = {m: [*m.parameters(recurse=False), *m.buffers(recurse=False)] for m in modules}
    if any(tensor.is_meta for own in tensors.values() for tensor in own):
        for module in modules:
            if init is not None:
                init(module)
            elif tensors[module]:
                module.to_empty(device=device, recurse=False)
                module.reset_parameters()
    for module in modules if sync else ():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            tensor.data = tensor.data.to(device)
            torch.distributed.broadcast(tensor, src=0)


def sharding_options(strategy: Any, device_type: Any, mesh: Any = None) -> dict[str, Any]:
    """fully_shard's mesh and resharding for the name of one of FSDP1's strategies."""
    if strategy not in (None, "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        raise ValueError(f"{strategy!r} isn't one of FSDP1's strategies")
    hybrid = strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
    if mesh is None:
        shards = ranks = torch.distributed.get_world_size()
        if strategy == "NO_SHARD":  # whole parameters on each rank and all-reduced gradients, as DDP has them
            shards = 1
        elif hybrid:  # over the devices of a node, with a replica on each
            shards = torch.get_device_module(device_type).device_count()
        two = shards != ranks
        shape, names = ((ranks // shards, shards), ("replicate", "shard")) if two else ((ranks,), None)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    elif strategy == "NO_SHARD" or (mesh.ndim == 2) != hybrid:
        raise ValueError(f"{strategy} on a mesh of {mesh.ndim} dimensions")
    resharded = strategy in (None, "FULL_SHARD", "HYBRID_SHARD")
    return {"mesh": mesh, "reshard_after_forward": None if resharded else False}

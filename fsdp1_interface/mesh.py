"""The mesh that a sharding strategy of FSDP1 means."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

HYBRID_NAMES = ("replicate", "shard")  # in this order: fully_shard shards over the last dimension


def mesh_for(
    strategy: ShardingStrategy, device_type: str, process_group: Any = None, device_mesh: DeviceMesh | None = None
) -> DeviceMesh:
    """A mesh of one dimension for FULL_SHARD and SHARD_GRAD_OP, of two for HYBRID_SHARD; and for NO_SHARD one of
    two whose shards are of a single rank: parameters whole on each, gradients all-reduced, as DDP.

    Args:
        process_group: None, one group, or a pair (shard group, replicate group) for a hybrid strategy.

    Raises:
        ValueError: groups or mesh that the strategy can't use. A collective call if groups are given.
    """
    hybrid = strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    if device_mesh is not None:
        if hybrid != (device_mesh.ndim == 2):
            raise ValueError(f"device_mesh of {device_mesh.ndim} dimensions with {strategy.name}: see its docstring")
        if strategy is ShardingStrategy.NO_SHARD:
            return _replicas_of(device_mesh.get_group(), device_type)
        if device_mesh.ndim == 2 and not device_mesh.mesh_dim_names:  # which fully_shard wants, and FSDP1 didn't
            groups = [device_mesh.get_group(dimension) for dimension in (0, 1)]
            return DeviceMesh.from_group(groups, device_type, mesh=device_mesh.mesh, mesh_dim_names=HYBRID_NAMES)
        return device_mesh
    if isinstance(process_group, (tuple, list)):
        if not hybrid or len(process_group) != 2:
            raise ValueError(
                f"process_group of {len(process_group)} groups with {strategy.name}: a pair is for HYBRID_SHARD"
            )
        shard, replicate = process_group
        return _of_pair(shard, replicate, device_type)
    if hybrid:
        if process_group is not None:
            raise ValueError(f"process_group with {strategy.name}: give a pair (shard, replicate), or a device_mesh")
        shards = torch.get_device_module(device_type).device_count()
        if dist.get_world_size() % shards:
            raise ValueError(
                f"{strategy.name}: {dist.get_world_size()} ranks aren't nodes of {shards} devices; give a device_mesh"
            )
        return _mesh(device_type, (dist.get_world_size() // shards, shards))
    if strategy is ShardingStrategy.NO_SHARD:
        return _replicas_of(process_group, device_type)
    if process_group is None or process_group is dist.group.WORLD:
        return _mesh(device_type, (dist.get_world_size(),))
    return DeviceMesh.from_group(process_group, device_type)


def _mesh(device_type: str, shape: tuple[int, ...]) -> DeviceMesh:
    return _mesh_of(dist.group.WORLD, device_type, shape)


@functools.lru_cache(maxsize=8)
def _mesh_of(world: Any, device_type: str, shape: tuple[int, ...]) -> DeviceMesh:
    """The same mesh for the same shape as long as the default group lives: each new one of two dimensions makes
    groups of its own, and nested calls of FSDP would make them again and again."""
    return init_device_mesh(device_type, shape, mesh_dim_names=HYBRID_NAMES if len(shape) == 2 else ("shard",))


def _replicas_of(group: Any, device_type: str) -> DeviceMesh:
    if group is None or group is dist.group.WORLD:
        return _mesh(device_type, (dist.get_world_size(), 1))
    alone = None
    for rank in range(dist.get_world_size()):  # each rank has to take part in making each group
        made = dist.new_group([rank])
        alone = made if rank == dist.get_rank() else alone
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(-1, 1)
    return DeviceMesh.from_group([group, alone], device_type, mesh=ranks, mesh_dim_names=HYBRID_NAMES)  # type: ignore[list-item]


def _of_pair(shard: Any, replicate: Any, device_type: str) -> DeviceMesh:
    """The ranks as a table: a row is a shard group, a column a replicate group."""
    rows: list[list[int]] = [[] for _ in range(dist.get_world_size(replicate))]
    dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
    return DeviceMesh.from_group([replicate, shard], device_type, mesh=torch.tensor(rows), mesh_dim_names=HYBRID_NAMES)

"""The device mesh: which ranks shard a model among them, and which hold copies of the same shard.

Source: https://docs.pytorch.org/tutorials/recipes/distributed_device_mesh.html
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def make_mesh(device_type: str, world_size: int, replicas: int = 1) -> DeviceMesh:
    """A mesh for `fully_shard`. A collective call: torch makes a process group for each dimension.

    Args:
        replicas: 1 gives the 1-D mesh `("shard",)` of plain FSDP: parameters are split over all ranks. More
            give the 2-D mesh `("replicate", "shard")` of HSDP: parameters are split over the ranks of a row,
            which on several nodes should be the GPUs of one node, and the rows hold the same shards and
            all-reduce their gradients. (2, 1) on two ranks therefore shards nothing.

    Raises ValueError if `replicas` doesn't divide `world_size`.
    """
    if world_size % replicas:
        raise ValueError(f"{replicas} replicas don't divide {world_size} ranks")
    if replicas == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    # The shard dimension is the inner one: its ranks are neighbours, where links are fastest.
    return init_device_mesh(device_type, (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))

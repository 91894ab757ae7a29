"""The device mesh: which ranks shard a model among them, which hold copies of a shard, and which split its layers.

Source: https://docs.pytorch.org/tutorials/recipes/distributed_device_mesh.html
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def make_mesh(device_type: str, world_size: int, replicas: int = 1, tp: int = 1) -> DeviceMesh:
    """The mesh of a run. A collective call: torch makes a process group for each dimension.

    Args:
        replicas: 1 gives the 1-D mesh `("shard",)` of plain FSDP: parameters are split over all ranks. More
            give the 2-D mesh `("replicate", "shard")` of HSDP: parameters are split over the ranks of a row,
            which on several nodes should be the GPUs of one node, and the rows hold the same shards and
            all-reduce their gradients. (2, 1) on two ranks therefore shards nothing.
        tp: more than 1 adds the dimension `"tp"`, whose ranks split each layer between them. `fully_shard` takes the
            others, see `of_fsdp`.

    Raises ValueError if these don't divide `world_size`.
    """
    if world_size % (replicas * tp):
        raise ValueError(f"{replicas} replicas x {tp} ranks of tensor parallelism don't divide {world_size} ranks")
    # From outside in: ranks that exchange the most are neighbours, where links are fastest. Tensor parallelism waits
    # for each of its collectives, several in each layer; FSDP2's run beside the layers; replicas exchange once.
    sizes = {"replicate": replicas, "shard": world_size // (replicas * tp), "tp": tp}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def of_pieces(device_type: str, world_size: int, tp: int, sp: int) -> DeviceMesh:
    """The ranks that have pieces of the same sequences, 1-D. A collective call.

    For FSDP2 they are ranks that shard, so they stand within that dimension of the run's mesh, next to its `tp`.
    """
    names = ("samples", "pieces", "tp")
    return init_device_mesh(device_type, (world_size // (sp * tp), sp, tp), mesh_dim_names=names)["pieces"]


def of_fsdp(mesh: DeviceMesh) -> DeviceMesh:
    """The dimensions of a mesh over which `fully_shard` shards and replicates."""
    names = mesh.mesh_dim_names or ()
    return mesh[tuple(name for name in names if name != "tp")] if "tp" in names else mesh

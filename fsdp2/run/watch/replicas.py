"""Return whether ranks that hold the same part of the model still hold the same bits of it.

Replicas of HSDP, and all ranks of DDP, start from the same parameters and get the same averaged gradients. They stay
equal to the bit, unless a GPU or a memory computes wrongly and says nothing: silent data corruption
(https://arxiv.org/abs/2102.11245). What goes wrong in gradients after their reduction arrives with the next step in the
parameters and the optimizer's state, which are compared.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2.options.errors import some
from fsdp2.parallel.engine import Engine
from fsdp2.parallel.inspect import local
from fsdp2.run.process.group import gather

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class Replicas:
    """The comparison of a run's replicas, once for each step that asks for it."""

    def __init__(self, engine: Engine, device: torch.device, step: int) -> None:
        """`step`: until which the run is done already."""
        self._engine, self._device = engine, device
        self.agreed = self._compared = step

    def compare(self, step: int) -> tuple[list[int], str]:
        """The ranks that differ after this step, and a line about them; ([], "") if none does, or if it is known.

        A collective call. `agreed` is the last step after which none differed.
        """
        if self._compared == step:
            return [], ""
        self._compared = step
        held = self._engine.held()
        wrong, what = compare(held["parameters"] + held["optimizer"], self._device)
        if not wrong:
            self.agreed = step
            return [], ""
        return wrong, f"{what}; they agreed after step {self.agreed}"


@torch.no_grad()
def checksum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """A sum over the bits of what this rank holds of the tensors, 0-d int64 on `device`; one flipped bit changes it."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        bits = local(tensor).detach()
        bits = torch.view_as_real(bits) if bits.is_complex() else bits
        # Times an odd number: two tensors that change places change the sum.
        total = 3 * total + bits.view(INTEGERS[bits.element_size()]).sum(dtype=torch.int64).to(device)
    return total


def different(sums: Sequence[int], replicas: int) -> tuple[list[int], bool]:
    """The ranks whose sum is another than most of the ranks' with the same part, and whether there is such a majority
    wherever some differ: without one all of its ranks are among them.

    Args:
        sums: of the ranks, which stand in `replicas` rows of the mesh.
    """
    holders = defaultdict(list)
    for rank in range(len(sums)):
        holders[rank % (len(sums) // replicas)].append(rank)
    wrong: list[int] = []
    majority = True
    for ranks in holders.values():
        (usual, count), *_ = Counter(sums[rank] for rank in ranks).most_common()
        most = count > len(ranks) / 2
        majority = majority and most
        wrong += [] if count == len(ranks) else [rank for rank in ranks if not most or sums[rank] != usual]
    return sorted(wrong), majority


def copies(tensors: Sequence[Tensor], world_size: int) -> int:
    """How many ranks hold each element: the rows of HSDP's mesh, and all ranks if tensors are whole, as in DDP."""
    mesh = next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), None)
    return world_size if mesh is None else mesh.size(0) if "replicate" in (mesh.mesh_dim_names or ()) else 1


def compare(tensors: Sequence[Tensor], device: torch.device) -> tuple[list[int], str]:
    """The ranks that hold other bits than their replicas, and a line about them; ([], "") if all agree.

    A collective call, of 8 bytes a rank, with the same result on all of them. It waits for a GPU.
    """
    sums = torch.empty(dist.get_world_size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sums, checksum(tensors, device).reshape(1))
    wrong, majority = different(sums.tolist(), copies(tensors, len(sums)))
    if not wrong:
        return [], ""
    hosts = gather(socket.gethostname())
    names = some([f"rank {rank} ({hosts[rank]})" for rank in wrong])
    hold = "hold other bits than most of their replicas" if majority else "differ, and which is right isn't known"
    return wrong, f"replicas differ: parameters or optimizer state of {names} {hold}"

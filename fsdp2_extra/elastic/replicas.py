"""Compare the bits of parameters and optimizer state that several ranks hold alike.

Replicas of HSDP, all ranks of DDP, and ranks of tensor parallelism, as far as their layers aren't split (norms), start
from the same numbers and get the same gradients. They stay equal to the bit, unless a loop forgets to sum a gradient,
or a GPU or a memory computes wrongly and says nothing: silent data corruption (https://arxiv.org/abs/2102.11245). What
goes wrong in gradients after their reduction arrives with the next step in the parameters and the optimizer's state.
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2.options.errors import some
from fsdp2.parallel.engine import Engine
from fsdp2.parallel.shards import local
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

        A collective call, of 8 bytes a tensor and rank, that waits for a GPU. `agreed` is the last step after which
        none differed.
        """
        if self._compared == step:
            return [], ""
        self._compared = step
        named = dict(_named(self._engine))
        mine = torch.stack([checksum(tensor, self._device) for tensor in named.values()])
        sums = mine.new_empty(dist.get_world_size() * len(mine))
        dist.all_gather_into_tensor(sums, mine)
        wrong: set[int] = set()
        names, known = [], True
        for (name, tensor), column in zip(named.items(), sums.view(-1, len(mine)).t().cpu(), strict=True):
            rows = holders(tensor, len(column))
            if (column[rows] != column[rows[:, :1]]).any():
                ranks, majority = different(column.tolist(), rows.tolist())
                wrong, known = wrong.union(ranks), known and majority
                names.append(name)
        if not wrong:
            self.agreed = step
            return [], ""
        hosts = gather(socket.gethostname())
        of = some([f"rank {rank} ({hosts[rank]})" for rank in sorted(wrong)])
        hold = "hold other bits than most of their replicas" if known else "differ, and which is right isn't known"
        what = f"replicas differ: parameters or optimizer state of {of} {hold}: {some(names)}"
        return sorted(wrong), f"{what}; they agreed after step {self.agreed}"


def _named(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in engine.model.named_parameters():
        yield name, parameter
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield f"{name}'s {key}", value


@torch.no_grad()
def checksum(tensor: Tensor, device: torch.device) -> Tensor:
    """The sum of the bits of what this rank holds, 0-d int64 on `device`; one flipped bit changes it."""
    bits = local(tensor).detach()
    bits = torch.view_as_real(bits) if bits.is_complex() else bits
    return bits.view(INTEGERS[bits.element_size()]).sum(dtype=torch.int64).to(device)


def different(sums: Sequence[int], holders: Sequence[Sequence[int]]) -> tuple[list[int], bool]:
    """The ranks whose sum is another than most of the ranks' with the same part, and whether there is such a majority
    wherever some differ: without one all of its ranks are among them. `sums` are of all ranks."""
    wrong: list[int] = []
    majority = True
    for ranks in holders:
        (usual, count), *_ = Counter(sums[rank] for rank in ranks).most_common()
        most = count > len(ranks) / 2
        majority = majority and most
        wrong += [] if count == len(ranks) else [rank for rank in ranks if not most or sums[rank] != usual]
    return sorted(wrong), majority


def holders(tensor: Tensor, world_size: int) -> Tensor:
    """Ranks that hold the same elements, a row: along the mesh's dimensions that replicate; of a whole tensor all."""
    if not isinstance(tensor, DTensor):
        return torch.arange(world_size)[None]
    mesh = tensor.device_mesh.mesh
    alike = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    apart = [dim for dim in range(mesh.dim()) if dim not in alike]
    return mesh.permute(*apart, *alike).reshape(-1, math.prod(mesh.size(dim) for dim in alike))

"""Strategy `fsdp2`: `torch.distributed.fsdp.fully_shard`.

Each parameter becomes a DTensor, split on its first dimension over the ranks of the mesh. A group of
modules all-gathers its parameters before its forward and backward, frees them after, and reduce-scatters
its gradients. Source: https://docs.pytorch.org/docs/main/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from fsdp2.parallel.engine import Engine
from fsdp2.parallel.inspect import summary


def offload_policy(cpu_offload: bool, device_type: str) -> OffloadPolicy:
    """Pinned memory only where there is a GPU to copy to: without a driver, pinning raises."""
    return CPUOffloadPolicy(pin_memory=device_type == "cuda") if cpu_offload else OffloadPolicy()


def shard(
    model: nn.Module,
    groups: Sequence[list[nn.Module]],
    *,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    reshard_after_forward: bool | int | None,
) -> list[FSDPModule]:
    """Shard each group, then the root; the modules that stand for the groups, in forward order.

    Bottom up, because a call takes the parameters that no call below it has taken: the root comes last and
    gets what is left. Torch's rule for `reshard_after_forward=None` is True for groups and False for the
    root, whose parameters backward needs first.
    """
    settings = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload}
    heads = []
    for group in groups:
        fully_shard(group, reshard_after_forward=reshard_after_forward, **settings)  # type: ignore[call-overload]
        heads.append(cast(FSDPModule, group[0]))
    fully_shard(model, reshard_after_forward=reshard_after_forward, **settings)  # type: ignore[call-overload]
    return heads


class FSDP2Engine(Engine):
    """`early_unshard`: all-gather the root before the data of a step is there, as explicit prefetching does."""

    strategy = "fsdp2"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler,
        *,
        early_unshard: bool,
    ) -> None:
        super().__init__(model, optimizer, scaler)
        self.root = cast(FSDPModule, model)
        self.early_unshard = early_unshard

    @property
    def sharding(self) -> str:
        return summary(self.model)

    def begin_step(self) -> None:
        if self.early_unshard:
            self.root.unshard(async_op=True)

    def backward(self, loss: Tensor, last_microbatch: bool) -> None:
        self.root.set_is_last_backward(last_microbatch)
        self.root.set_requires_gradient_sync(last_microbatch)
        try:
            super().backward(loss, last_microbatch)
        finally:
            # Also after an error: a model left like this would train on without exchanging gradients.
            self.root.set_requires_gradient_sync(True)
            self.root.set_is_last_backward(True)

    def _total_norm(self, gradients: list[Tensor]) -> Tensor:
        # Of the local shards, so that one number travels: get_total_norm on DTensors gives the same, but takes longer
        # since each operation on them is dispatched by layout. The sum is over the dimensions of a mesh that shard: in
        # HSDP all replicas have the same. One all-reduce, unless parts of the model are sharded differently.
        groups: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = {}
        for gradient in cast(list[DTensor], gradients):
            assert not any(placement.is_partial() for placement in gradient.placements), "it has no norm before its sum"
            dims = tuple(dim for dim, place in enumerate(gradient.placements) if not place.is_replicate())
            groups.setdefault((gradient.device_mesh, dims), []).append(gradient.to_local())
        squares = []
        for (mesh, dims), shards in groups.items():  # in the same order on all ranks
            squares.append(super()._total_norm(shards).square())
            for dim in dims:
                dist.all_reduce(squares[-1], group=mesh.get_group(dim))
        return functools.reduce(torch.add, squares).sqrt()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        try:
            with super().evaluating():
                yield
        finally:
            # Backward frees what the reshard policy keeps gathered after forward; here there was none.
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

"""Modules that compute with plain tensors, as on one rank, while ranks split or share their parameters.

Tensor parallelism needs each parameter to be a DTensor. torch's styles let a linear layer compute with DTensors; of a
norm, a mixer or a stranger's attention nobody knows whether each of its operations could. So these read a DTensor as
the plain tensor that the rank needs, and DTensor sends gradients back by what is said of it: `Read`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._pytree import tree_map_only


class Read(NamedTuple):
    """A parameter's place on ranks, and the plain tensor its module computes with: a rank's own, unless `gathered`.

    Attributes:
        placement: of the parameter, its gradient and its optimizer state.
        gradient: how ranks have the gradient of what the module computes with: `Partial`, to be summed, where it is
            that of some heads or hidden numbers alone.
        gathered: the module computes with all of it, which is sent in each forward.
        packed: of what is gathered a rank computes with its part of both halves along this dimension, a gate's and
            an up's. So the parameter, and a checkpoint, has the order in which it was published.
    """

    placement: Placement
    gradient: Placement
    gathered: bool = False
    packed: int | None = None

    @property
    def cut(self) -> int | None:
        """The dimension of which a rank's module sees a part."""
        return self.packed if self.gathered else self.placement.dim if isinstance(self.placement, Shard) else None

    def __call__(self, parameter: DTensor) -> Tensor:
        """A collective call for what is gathered. Its backward sums and cuts the gradient to be like the parameter."""
        mesh = parameter.device_mesh
        if self.gathered:
            parameter = parameter.redistribute(placements=[Replicate()])
        mine = parameter.to_local(grad_placements=[self.gradient])
        if self.packed is None:
            return mine
        halves = (half.chunk(mesh.size(), self.packed)[mesh.get_local_rank()] for half in mine.chunk(2, self.packed))
        return torch.cat(list(halves), self.packed)


WHOLE = Read(Replicate(), Replicate())
OF_SOME_HEADS = Read(Replicate(), Partial())


def part(dim: int) -> Read:
    """A rank computes with its slice along a dimension."""
    return Read(Shard(dim), Shard(dim))


def packed(dim: int) -> Read:
    """A rank computes with its slices of the two weights that lie in one."""
    return Read(Shard(dim), Partial(), gathered=True, packed=dim)


def gathered(dim: int) -> Read:
    """Ranks have slices, and each computes with all of it."""
    return Read(Shard(dim), Replicate(), gathered=True)


Change = Callable[[Tensor, DeviceMesh], Tensor]


class Locally(ParallelStyle):
    """A module that computes with plain tensors.

    Args:
        reads: of parameters of its own, how it reads them; the others are `WHOLE`.
        before: changes what it takes, and `after` what it gives: each tensor of real numbers.
    """

    def __init__(
        self, reads: Mapping[str, Read] | None = None, before: Change | None = None, after: Change | None = None
    ) -> None:
        super().__init__()
        self.reads, self.before, self.after = dict(reads or {}), before, after

    @property
    def travels(self) -> bool:
        """True if it exchanges something with the other ranks."""
        return self.before is not None or self.after is not None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        reads = {name: self.reads.get(name, WHOLE) for name, _ in module.named_parameters(recurse=False)}
        for name, read in reads.items():
            split = distribute_tensor(module.get_parameter(name), device_mesh, [read.placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(split))
        # In the class, where attributes are looked for first: another module may read it too, as a mixer its child's.
        kind = type(module)
        module.__class__ = type(kind.__name__, (kind,), {name: _plain(name, read) for name, read in reads.items()})
        if any(read.gathered for read in reads.values()):  # sent once in a forward, and not for each expert
            module.register_forward_pre_hook(lambda one, _: one.__dict__.update(_sent={}))
            module.register_forward_hook(lambda one, *_: one.__dict__.update(_sent=None), always_call=True)
        if (before := self.before) is not None:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: _real(lambda one: before(one, device_mesh), (args, kwargs)), with_kwargs=True
            )
        if (after := self.after) is not None:
            module.register_forward_hook(lambda _, args, given: _real(lambda one: after(one, device_mesh), given))
        return module


def _plain(name: str, read: Read) -> property:
    def plain(module: nn.Module) -> Any:
        parameter: Any = module._parameters[name]
        # Where FSDP2 hasn't gathered it, it is one of FSDP2's mesh too, and nothing to compute with.
        if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim > 1:
            return parameter
        if (sent := module.__dict__.get("_sent")) is None:
            return read(parameter)
        return sent[name] if name in sent else sent.setdefault(name, read(parameter))

    return property(plain)


def _real(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    return tree_map_only(Tensor, lambda one: change(one) if one.is_floating_point() else one, tree)


def in_parts(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Activations (…), the same on all ranks, for layers that are split; its backward, a collective call, sums."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of the ranks' tensors, each (…). A collective call; its gradient is the same on all ranks."""
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()

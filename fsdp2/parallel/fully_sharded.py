"""Strategy `fsdp2`: `torch.distributed.fsdp.fully_shard`.

Each parameter becomes a DTensor, split on its first dimension over the ranks of the mesh. A group of
modules all-gathers its parameters before its forward and backward, frees them after, and reduce-scatters
its gradients. Source: https://docs.pytorch.org/docs/main/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

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
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from fsdp2.parallel.engine import Engine, Microbatch
from fsdp2.parallel.groups import may_have_experts, of_other_dtypes, shared_parameters
from fsdp2.parallel.precision import with_statistics
from fsdp2.parallel.shards import groups_of, summary

if TYPE_CHECKING:
    from fsdp2.parallel.experts import Unchosen


def offload_policy(cpu_offload: bool, device_type: str) -> OffloadPolicy:
    """Pinned memory only where there is a GPU to copy to: without a driver, pinning raises."""
    return CPUOffloadPolicy(pin_memory=device_type == "cuda") if cpu_offload else OffloadPolicy()


@contextmanager
def gathered_or_told() -> Iterator[None]:
    """Raise torch's RuntimeError about a shard where a whole weight was expected with its cause and the fix."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise RuntimeError(
            "a weight is used that isn't gathered: FSDP2 gathers a block when the block itself is called, and this "
            "model takes its weights in another way, such as block.forward(x) or block.weight. Gather all at once with "
            "--shard-granularity root, or name modules that are called with --shard-modules. torch says: "
            + str(error).partition("!")[0]
        ) from error


def shard(
    model: nn.Module,
    groups: Sequence[list[nn.Module]],
    *,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy | None = None,
    offload: OffloadPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
) -> list[FSDPModule]:
    """Shard each group, then the root; the modules that stand for the groups, in forward order.

    Bottom up, because a call takes the parameters that no call below it has taken: the root comes last and gets what is
    left, and what several groups use. Inside of a group, modules of another dtype come before it, and batch norms where
    the compute dtype isn't fp32: they are gathered by themselves. With `reshard_after_forward=None` groups are freed
    after their forward, but neither the root nor the last group: backward needs their parameters first, so they would
    be gathered again at once.

    Args:
        model: on meta or on the mesh's device; changed in place. Its optimizer is made afterwards.
        groups: modules that are gathered together, see `shard_groups`; no module in two of them.
        mesh: 1-D to shard over all of its ranks, or 2-D (replicate, shard) for HSDP.
        reshard_after_forward: an int reshards to so many ranks, which must divide the shard dimension.

    Without a collective; each rank must call it with the same model and groups. A reduce-scatter averages gradients
    over all ranks. Source: https://docs.pytorch.org/docs/main/distributed.fsdp.fully_shard.html
    """
    policies = {"mp_policy": precision or MixedPrecisionPolicy(), "offload_policy": offload or OffloadPolicy()}
    settings = {"mesh": mesh, **policies}
    heads = []
    shared = shared_parameters(groups)
    for group in groups:
        kept = reshard_after_forward is None and group is groups[-1]
        policy = False if kept else reshard_after_forward
        _shard_norms(group, policy, settings)
        for module in group:
            module.register_forward_hook(outlive)  # before fully_shard's own hook, which frees
        for part in of_other_dtypes(group, shared):
            fully_shard(part, reshard_after_forward=policy, ignored_params=shared, **settings)  # type: ignore[call-overload]
        if rest := [module for module in group if not isinstance(module, FSDPModule)]:
            fully_shard(rest, reshard_after_forward=policy, ignored_params=shared, **settings)  # type: ignore[call-overload]
        heads.append(cast(FSDPModule, (rest or group)[0]))
    taken = {parameter for group in groups for module in group for parameter in module.parameters()} - shared
    _shard_norms([model], reshard_after_forward, settings)
    for part in of_other_dtypes([model], taken):
        fully_shard(part, reshard_after_forward=reshard_after_forward, **settings)  # type: ignore[call-overload]
    fully_shard(model, reshard_after_forward=reshard_after_forward, **settings)  # type: ignore[call-overload]
    if may_have_experts(model):
        from fsdp2.parallel.experts import exchange_zeros

        exchange_zeros(model)
    return heads


def outlive(module: nn.Module, _: object, output: Any) -> Any:
    """A forward hook: what shares its memory with a parameter of the module is copied, for that memory is freed.

    A layer of learned positions returns its table, or a view of it. Whoever reads it after the forward would
    silently read reused memory.
    """
    # Private, and what fully_shard's own hooks find the tensors of a library's output with; torch has no public one.
    from torch.utils._pytree import tree_map_only

    whole = (parameter for parameter in module.parameters() if not isinstance(parameter, DTensor))
    # By identity, which a storage keeps: the addresses of tensors without memory, of a plan, are all 0.
    freed = {id(storage): storage for storage in (parameter.untyped_storage() for parameter in whole)}

    def outliving(one: Tensor) -> Tensor:
        if id(one.untyped_storage()) not in freed:
            return one
        once = one
        for dimension in range(one.dim()):
            if one.stride(dimension) == 0:  # expanded, and stays so
                once = once.narrow(dimension, 0, 1)
        return once.clone().expand(one.shape)

    return tree_map_only(Tensor, outliving, output)


def _shard_norms(modules: Sequence[nn.Module], reshard: bool | int | None, settings: Mapping[str, Any]) -> None:
    """Give the batch norms among modules a group that computes in fp32, whatever dtype their inputs have."""
    norms = [norm for norm in with_statistics(modules) if not isinstance(norm, FSDPModule)]
    if norms and settings["mp_policy"].param_dtype not in (None, torch.float32):
        as_they_are = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(norms, reshard_after_forward=reshard, **{**settings, "mp_policy": as_they_are})


def gather_for(model: nn.Module, methods: Sequence[str]) -> None:
    """Let other methods of a sharded model find its parameters gathered, as `forward` does.

    A group is gathered when its module is called. A method that isn't `forward` finds those of the root sharded, and if
    it calls a part of the model before the whole, as `generate` of an encoder and decoder does, torch takes that part
    for the root.

    Args:
        methods: their names. None that `forward` calls: the root would be freed in the midst of it.
    """
    for name in methods:
        register_fsdp_forward_method(model, name)


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The 2-norm of sharded gradients as one vector: 0-d, in their dtype, the same on every rank. A collective call.

    Source: `torch.nn.utils.get_total_norm`, of which this is the form for shards.
    """
    # Of the local shards, so that one number travels: get_total_norm on DTensors gives the same, but takes longer
    # since each operation on them is dispatched by layout. The sum is over the dimensions of a mesh that shard: in
    # HSDP all replicas have the same. One all-reduce, unless parts of the model are sharded differently.
    groups: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = {}
    for gradient in cast(Iterable[DTensor], gradients):
        assert not any(placement.is_partial() for placement in gradient.placements), "it has no norm before its sum"
        dims = tuple(dim for dim, one in enumerate(gradient.placements) if not one.is_replicate())
        groups.setdefault((gradient.device_mesh, dims), []).append(gradient.to_local())
    squares = []
    for (mesh, dims), shards in groups.items():  # in the same order on all ranks
        squares.append(torch.nn.utils.get_total_norm(shards, foreach=True).square())
        for dim in dims:
            dist.all_reduce(squares[-1], group=mesh.get_group(dim))
    return functools.reduce(torch.add, squares).sqrt()


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: float) -> Tensor:
    """Scale the gradients of sharded parameters down to a norm. A collective call.

    Returns the 2-norm before that, 0-d, over all ranks. Source: `torch.nn.utils.clip_grad_norm_`.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    total = total_norm([parameter.grad for parameter in with_gradient if parameter.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(with_gradient, norm, total, foreach=True)
    return total


class FSDP2Engine(Engine):
    """FSDP2.

    Args:
        early_unshard: all-gather the root before the data of a step is there, as explicit prefetching does.
        splits_words: with tensor parallelism, the loss is made of logits that ranks hold by words.
        accumulation_sync: one of `names.ACCUMULATION_SYNC`. Between microbatches a rank holds gradients of a shard's
            size; with `last` it holds those of the whole model, in the reduce dtype. `replica` needs a 2-D mesh.
    """

    strategy = "fsdp2"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler,
        *,
        early_unshard: bool,
        accumulation_sync: str = "every",
        splits_words: bool = False,
    ) -> None:
        super().__init__(model, optimizer, scaler)
        self.root = cast(FSDPModule, model)
        self.early_unshard = early_unshard
        self.accumulation_sync, self._splits_words = accumulation_sync, splits_words
        self.unchosen: Unchosen | None = None
        if may_have_experts(model):
            from fsdp2.parallel.experts import Unchosen

            self.unchosen = Unchosen(model)

    @property
    def sharding(self) -> str:
        return summary(self.model)

    def losses(self) -> AbstractContextManager[None]:
        if not self._splits_words:
            return super().losses()
        from torch.distributed.tensor.parallel import loss_parallel

        return cast(AbstractContextManager[None], loss_parallel())

    def begin_step(self) -> None:
        if self.early_unshard:
            self.root.unshard(async_op=True)

    def forward(self, batch: Microbatch) -> Any:
        with gathered_or_told():
            return super().forward(batch)

    def backward(self, loss: Tensor, last_microbatch: bool) -> None:
        self._exchange_all(last_microbatch)
        try:
            with gathered_or_told():
                super().backward(loss, last_microbatch)
        finally:
            # Also after an error: a model left like this would train on without exchanging gradients.
            self._exchange_all(True)

    def _exchange_all(self, now: bool) -> None:
        """Let the next backward complete the exchange of gradients, or defer what the mode defers."""
        if self.accumulation_sync == "last":
            self.root.set_requires_gradient_sync(now)
            # Not the last means that torch needn't wait for an exchange at the end of backward: there is none. In the
            # other modes each backward ends like a last one, since a reduction that torch doesn't wait for keeps the
            # unsharded gradients of its group, its input, until another group needs the place.
            self.root.set_is_last_backward(now)
        elif self.accumulation_sync == "replica":
            self.root.set_requires_all_reduce(now)

    def _clip(self, norm: float | None) -> Tensor:
        if self.unchosen is not None:
            self.unchosen.drop()
        return super()._clip(norm)

    def _total_norm(self, gradients: list[Tensor]) -> Tensor:
        return total_norm(gradients)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        try:
            with super().evaluating():
                yield
        finally:
            # Backward frees what the reshard policy keeps gathered after forward; here there was none.
            for group in groups_of(self.model):
                group.reshard()

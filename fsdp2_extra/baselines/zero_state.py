"""ZeRO's model and optimizer as a checkpoint sees them: the parameters by name, as DTensors, and their state.

DeepSpeed keeps flat shards that are cut anywhere, and its own checkpoints are pickles of them for one world size. Here
its state is copied, a parameter at a time, into a model that `fully_shard` has sharded and an optimizer over that. So
it is saved, verified, resumed at another world size or by another strategy, and exported as everything else is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2.parallel.optimizer import plain_optimizer
from fsdp2.parallel.shards import local


class Shadow:
    """A sharded model and its optimizer that have memory only from `fill` to `empty`.

    Args:
        engine: DeepSpeed's.
        flat: torch's optimizer over DeepSpeed's flat shards.
        model: the same model, sharded by `fully_shard` and allocated.
        name: of the optimizer.

    All methods are collective calls, after the same step: DeepSpeed gathers each parameter whole, one at a time.
    """

    def __init__(self, engine: Any, flat: torch.optim.Optimizer, model: nn.Module, name: str) -> None:
        self.model, self._engine, self._flat = model, engine, flat
        lr = flat.param_groups[0]["lr"]
        materialise(engine.optimizer, flat, name, lr)
        # Fused or not as the training's, since the step counters of the two kinds are on different devices.
        self.optimizer = plain_optimizer(name, model.parameters(), lr, fused=is_fused(flat))
        self._memory = [(storage, storage.nbytes()) for storage in self._storages()]
        self.empty()

    def empty(self) -> None:
        """Give the memory back, until the next `fill`."""
        for storage, _ in self._memory:
            storage.resize_(0)

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the training's state into model and optimizer."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for storage, size in self._memory:
            storage.resize_(size)
        for ours, theirs in self._pairs():
            if not theirs.requires_grad:
                with whole(theirs, write=False):
                    local(ours).copy_(share(theirs, ours))
                continue
            local(ours).copy_(share(safe_get_full_fp32_param(theirs), ours))
            for key, value in self.optimizer.state[ours].items():
                if value.dim() > 0:
                    local(value).copy_(share(safe_get_full_optimizer_state(theirs, key), value))
        self._copy_counters(self._flat, self.optimizer)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self._engine.module.get_buffer(name))

    @torch.no_grad()
    def pour_out(self) -> None:
        """Copy the state of model and optimizer into the training, and give the memory back."""
        for ours, theirs in self._pairs():
            value = gathered(ours)
            with whole(theirs, write=True):
                theirs.copy_(value)
            if theirs.requires_grad:
                set_fp32(theirs, value)
                for key, moment in self.optimizer.state[ours].items():
                    if moment.dim() > 0:
                        set_fp32(theirs, gathered(moment), key)
        self._copy_counters(self.optimizer, self._flat)
        for name, buffer in self.model.named_buffers():
            self._engine.module.get_buffer(name).copy_(buffer)
        self.empty()

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        theirs = dict(self._engine.module.named_parameters())
        return ((ours, theirs[name]) for name, ours in self.model.named_parameters())

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        for parameter in self.model.parameters():
            yield local(parameter).untyped_storage()
        for state in self.optimizer.state.values():
            for value in state.values():
                if value.dim() > 0:
                    yield local(value).untyped_storage()

    def _copy_counters(self, source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
        """Steps, of which DeepSpeed's flat shards have one each, and the settings of the parameter groups."""
        counters = next(iter(source.state.values()))
        for state in target.state.values():
            for key, value in state.items():
                if value.dim() == 0:
                    value.copy_(counters[key])
        for there, here in zip(source.param_groups, target.param_groups, strict=True):
            here.update({key: value for key, value in there.items() if key != "params"})


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor, if it is a DTensor. A collective call for a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share(full: Tensor, like: Tensor) -> Tensor:
    """This rank's rows of a whole tensor: those that `like`, a DTensor sharded on its first dimension, has here."""
    if not isinstance(like, DTensor):
        return full
    chunks = full.chunk(like.device_mesh.size(), dim=0)
    rank = like.device_mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else full[:0]


def set_fp32(parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
    """Write a whole tensor, fp32, into DeepSpeed's shards of a parameter, or of its optimizer state `key`."""
    from deepspeed import utils

    if not hasattr(parameter, "ds_id"):
        utils.safe_set_full_optimizer_state(parameter, value, key)  # without a key it is the parameter itself
        return
    # Stage 3 has a function for the whole tensor too, but it fails where the ranks' shards aren't of the same size.
    shard: Any = getattr(parameter, "ds_tensor")  # noqa: B009 - an attribute of DeepSpeed's, on a class of torch's
    size, rank = shard.numel(), dist.get_rank()
    mine = value.flatten()[size * rank : size * (rank + 1)]
    mine = nn.functional.pad(mine, (0, size - mine.numel()))
    utils.safe_set_local_optimizer_state(parameter, mine, key)


@contextmanager
def whole(parameter: nn.Parameter, *, write: bool) -> Iterator[None]:
    """A parameter of stage 3 as a whole tensor while entered; written back from rank 0 if `write`. A collective."""
    import deepspeed

    sharded = hasattr(parameter, "ds_id")
    with (
        deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if write else None) if sharded else nullcontext()
    ):
        yield


def shards_of(zero: Any) -> list[Tensor]:
    """This rank's flat shards in fp32, which the optimizer updates. DeepSpeed has no public name for them."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
        return list(zero.fp32_partitioned_groups_flat)
    return list(zero.single_partition_of_fp32_groups)


@contextmanager
def in_memory(zero: Any, index: int) -> Iterator[None]:
    """While entered, a flat shard and its optimizer's state are in memory, if they are kept in files otherwise.

    DeepSpeed's functions that read and write state by parameter do this themselves; for creating it there are only
    these, which are private.
    """
    in_files = hasattr(zero, "fp32_partitioned_groups_flat") and zero._swappable_optimizer_subgroup(index)
    if in_files:
        zero._optimizer_states_and_gradient_swap_in(index)
    yield
    if in_files:
        zero._optimizer_states_and_gradient_swap_out(index)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer updates by one kernel."""
    return bool(optimizer.defaults.get("fused"))


def materialise(zero: Any, flat: torch.optim.Optimizer, name: str, lr: float) -> None:
    """Create the state of the optimizer over the flat shards, at step 0, so that a checkpoint can be loaded into it.

    DeepSpeed would do so in its first step. In stages 1 and 2 the functions that read and write state by parameter
    have to be told of it, for which there is no public name either.
    """
    for index, shard in enumerate(shards_of(zero)):
        with in_memory(zero, index):
            gradient = shard.grad
            flat.state.update(plain_optimizer(name, [shard], lr, fused=is_fused(flat)).state)
            shard.grad = gradient  # with offload DeepSpeed has given it one to keep
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._lazy_init_hp_params_optimizer_state()

"""A rank of a large job in this one process: tensors without memory, and collectives that send nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

MOST_KNOWN = 1 << 20  # elements of a tensor whose values are computed
DEVICE = torch.ops.prim.device.default


def fake_mode() -> Any:
    """Inside, tensors have a shape, a dtype and a device, and no memory.

    Private: torch has no public name for what torch.compile traces with. tests/plan/test_fake.py fails when it moves.
    """
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def data_dependent() -> tuple[type[Exception], ...]:
    """The error of a tensor without values when an operation needs its values. Private, as `fake_mode` is."""
    from torch._subclasses import fake_tensor as fake

    return fake.DataDependentOutputException, fake.DynamicOutputShapeException, fake.UnsupportedFakeTensorException


def device_asked(func: Any, args: Any) -> torch.device | None:
    """The device of a fake tensor, if `func` asks for it, as torch does for each operation: a mode needn't ask others.

    Private, as `fake_mode` is; without these attributes the modes below answer the same.
    """
    if func is not DEVICE or getattr(getattr(args[0], "fake_mode", None), "in_kernel_invocation", True):
        return None
    return getattr(args[0], "fake_device", None)


@contextmanager
def fake_group(rank: int, ranks: int) -> Iterator[None]:
    """A process group in which this process is one rank of many, and the only one that exists.

    The backend `fake` is registered by a private module of torch's own tests; tests/plan/test_fake.py fails when it
    moves.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a plan needs a process without a process group; make it before init_process_group")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Values(TorchDispatchMode):
    """Answers reads of single values: outside of the model no NaN, a norm of 1, nothing that has overflowed.

    A model that reads values decides by them what to compute. Those that follow from no batch and no weight, such as
    `arange(…) + 1`, are computed beside the tensors that have none, so they are answered as in a run. Any other read
    raises one of `data_dependent`.

    Args:
        in_model: whether the model computes now.
    """

    def __init__(self, in_model: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.in_model = in_model
        self._overflows: set[int] = set()
        # Storages of values that something unknown was written into; kept, so that no other gets their number.
        self._unknown: dict[int, Any] = {}

    def knows(self, tensor: Any) -> bool:
        """Return whether a run would have the same values here."""
        value = getattr(tensor, "_value", None)
        return value is not None and value.untyped_storage()._cdata not in self._unknown

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = device_asked(func, args)
        return self.compute(func, args, kwargs or {}) if device is None else device

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operation's result, or answer it."""
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            self._overflows.add(args[1].untyped_storage()._cdata)
        if func is torch.ops.aten._local_scalar_dense.default:
            if self.knows(args[0]):
                with without_fakes():
                    return args[0]._value.item()
            if not self.in_model():
                is_false = args[0].dtype == torch.bool or args[0].untyped_storage()._cdata in self._overflows
                return False if is_false else 1
        result = func(*args, **kwargs)
        if self.in_model():
            self._follow(func, args, kwargs, result)
        return result

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute the values of a result whose arguments' values are known."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        known = (
            all(map(self.knows, given))
            and all(tensor.numel() <= MOST_KNOWN and not isinstance(tensor, DTensor) for tensor in made)
            and torch.Tag.nondeterministic_seeded not in func.tags
            and not func.name().removeprefix("aten::").startswith(("empty", "new_empty"))
            and func.namespace == "aten"
        )
        if not known:
            if func._schema.is_mutable:
                storages = [tensor._value.untyped_storage() for tensor in given if hasattr(tensor, "_value")]
                self._unknown.update((storage._cdata, storage) for storage in storages)
            return
        with without_fakes():
            values = tree_leaves(func(*tree_map(_value, args), **tree_map(_value, kwargs)))
        for tensor, value in zip(made, (one for one in values if isinstance(one, Tensor)), strict=True):
            tensor._value = value  # type: ignore[attr-defined]


def _value(leaf: Any) -> Any:
    return leaf._value if isinstance(leaf, Tensor) else leaf  # type: ignore[attr-defined]


def without_fakes() -> Any:
    """Inside, tensors have values again. Private, as `fake_mode` is."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def propagation_told(told: Callable[[bool], None]) -> AbstractContextManager[Any]:
    """Call `told` when DTensor begins and ends to learn a result's shape, by computing it on tensors of whole shapes.

    A run does it on tensors without memory. Private; tests/plan/test_fake.py fails when it moves.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def learning(*args: Any) -> Any:
        told(True)
        try:
            return original(*args)
        finally:
            told(False)

    return mock.patch.object(ShardingPropagator, original.__name__, learning)


def seen_by_transformers(values: Values) -> AbstractContextManager[Any]:
    """Let transformers read values that are known, and take a tensor for traced where they aren't.

    It makes the mask of a causal model whenever it can't read values that allow it to do without. It asks a private
    function of its own; tests/plan/test_transformers.py fails when that moves.
    """
    from transformers.utils import import_utils

    original = import_utils.is_fake_tensor
    return mock.patch.object(import_utils, "is_fake_tensor", lambda one: original(one) and not values.knows(one))


def enter_with_memory(model: nn.Module, modes: ExitStack, *entered: Any) -> None:
    """Enter contexts at the moment when a model on meta gets its memory.

    Before it a model is made and sharded, which needs no memory, and which takes ten times as long with fake tensors;
    a device mesh can't be made with them.
    """

    def to_empty(*args: Any, **kwargs: Any) -> nn.Module:
        del model.to_empty
        for context in entered:
            modes.enter_context(context)
        return model.to_empty(*args, **kwargs)

    model.to_empty = to_empty  # type: ignore[method-assign]

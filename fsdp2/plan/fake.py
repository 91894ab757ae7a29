"""A rank of a large job in this one process: tensors without memory, and collectives that send nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


def fake_mode() -> Any:
    """Inside, tensors have a shape, a dtype and a device, and no memory.

    Private: torch has no public name for what torch.compile traces with. tests/plan/test_fake.py fails when it moves.
    """
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def data_dependent() -> tuple[type[Exception], ...]:
    """What a tensor without values raises when an operation needs its values. Private, as `fake_mode` is."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
    )

    return DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException


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
    """Answers reads of single values outside of the model: no NaN, a norm of 1, nothing that has overflowed.

    A model that reads values decides by them what to compute, which a plan can't know: there the read raises one of
    `data_dependent`.

    Args:
        in_model: whether the model computes now.
    """

    def __init__(self, in_model: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.in_model = in_model
        self._overflows: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            self._overflows.add(args[1].untyped_storage()._cdata)
        if func is torch.ops.aten._local_scalar_dense.default and not self.in_model():
            is_false = args[0].dtype == torch.bool or args[0].untyped_storage()._cdata in self._overflows
            return False if is_false else 1
        return func(*args, **(kwargs or {}))


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

"""The memory ledger for fake tensors, which also names the module whose backward runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp2_extra.allocations.ledger import Allocation, Ledger
from fsdp2_tools.plan.fake import Values, device_asked
from fsdp2_tools.plan.work import Watch

LOSS = "loss"  # what the training loop computes after the model


@dataclass(eq=False)
class FakeLedger(Ledger):
    """Counts fake tensors, and names in backward the module whose gradient is computed.

    Attributes:
        gloo: a reduce-scatter takes a copy of its input, as gloo's does.
        values: computes operations. This mode takes its place while it is entered: one is quicker than two.
        watching: writes down every operator too.
    """

    gloo: bool = False
    values: Values = field(default_factory=Values)
    watching: Watch = field(default_factory=Watch)

    steps_done = 0
    _backward = LOSS
    _name: str | None = None
    _blind: ClassVar[bool] = False

    @property
    def in_model(self) -> bool:
        """Return whether a module's forward runs, in backward too where it is computed again."""
        return bool(self._modules)

    @property
    def module(self) -> str:
        """The innermost module whose forward or backward runs."""
        if self._modules:
            return self._modules[-1]
        if self.phases[-1].name == "backward":
            return self._backward
        return LOSS if self.phases[-1].name in ("forward", "evaluation") else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (device := device_asked(func, args)) is not None:
            return device
        if self._blind:
            return self._compute(func, args, kwargs or {})
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            self.watching.note(func, args, kwargs or {}, result, self.module, len(self.phases) - 1)
        return result

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as in a run; of a fake tensor torch would make another one
        return self.values.compute(func, args, kwargs)

    def __enter__(self) -> FakeLedger:
        self.values.__exit__(None, None, None)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.values.__enter__()

    @classmethod
    def look_away(cls, away: bool) -> None:
        """Let each ledger count nothing until it is said again."""
        cls._blind = away

    @contextmanager
    def named(self, operation: str) -> Iterator[None]:
        """Let what is allocated meanwhile have this operation: a planner knows what it makes in place of what."""
        self._name = operation
        try:
            yield
        finally:
            self._name = None

    def phase(self, name: str, step: int) -> None:
        self._backward = LOSS
        super().phase(name, step)

    def _note(self, tensor: Tensor, operation: str) -> Allocation | None:
        return None if tensor.is_meta else super()._note(tensor, operation)  # so a fake tensor on meta has none either

    def _enter(self, storage: Any, operation: str, kind: str | None = None) -> Allocation | None:
        new = super()._enter(storage, self._name or operation, kind)
        if new is not None:
            new.module = self.module
        return new

    def _collective(self, name: str, operation: str, values: Sequence[Any]) -> None:
        super()._collective(name, operation, values)
        tensors = [leaf for value in values for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        # FSDP2 allocates an exchange's result on the exchange's stream: what it lies in is named after it.
        choose = {"all-gather": max, "reduce-scatter": min}.get(name)
        if choose is not None:
            allocation = self._note(choose(tensors, key=lambda tensor: tensor.nbytes), name)
            if allocation is not None:
                allocation.operation = name
        if name == "reduce-scatter" and self.gloo:
            copy = torch.empty_like(max(tensors, key=lambda tensor: tensor.nbytes))
            self.mark("communication", [copy])

    def _out_of(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        super()._out_of(module, inputs, outputs)
        name = self._names.get(id(module), type(module).__name__)
        for tensor in tree_leaves(outputs):
            # The innermost module comes first, and a tensor that it hands on is its own.
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None and not tensor._backward_hooks:
                tensor.register_hook(lambda gradient, name=name: self._into_backward(name))

    def _into_backward(self, name: str) -> None:
        self._backward = name

"""A language model's loss without its logits as a whole: they are made, scored and given up some tokens at a time.

The logits of 8 x 4,096 tokens over a vocabulary of 128,000 take 17 GB in fp32, and their gradient as much again. Here
backward makes each chunk's logits a second time, which costs one more product of the last layer. torch 2.15 has
`F.linear_cross_entropy` for this; it takes a weight and no module, so FSDP2's hooks would never gather it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2.models.spec import Batch, ModelSpec

# What the last layer scores in the forward that runs now; None = it gives logits.
_TARGETS: ContextVar[Tensor | None] = ContextVar("targets", default=None)


@dataclasses.dataclass
class Instead:
    """Two numbers that a last layer gives in place of its sums; `given` once it has."""

    numbers: tuple[float, float]
    given: bool = False


_INSTEAD: ContextVar[Instead | None] = ContextVar("instead", default=None)


@contextmanager
def instead_of_sums(numbers: tuple[float, float]) -> Iterator[Instead]:
    """Let last layers give these numbers, so that what comes out of a model shows what it does to them."""
    token = _INSTEAD.set(instead := Instead(numbers))
    try:
        yield instead
    finally:
        _INSTEAD.reset(token)


def chunked(spec: ModelSpec, tokens: int) -> ModelSpec:
    """A specification of the same model whose outputs have, in place of logits, the sum of losses and of right answers.

    Args:
        tokens: whose logits exist at a time.

    What a model does to its logits after its last layer would be done to the sums: whoever trains has to try it once,
    with `instead_of_sums`. Raises ValueError where it is made if the model doesn't tell which layer makes the logits.
    """

    def make(**size: Any) -> nn.Module:
        model = spec.make(**size)
        head = None if spec.head is None else spec.head(model)
        if head is None:
            raise ValueError("--chunked-loss: the model doesn't tell which layer makes its logits; drop it")
        head.forward = Chunks(head.forward, tokens)
        return model

    def call(model: nn.Module, batch: Batch) -> Any:
        token = _TARGETS.set(batch.targets)
        try:
            return spec.call(model, batch)
        finally:
            _TARGETS.reset(token)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return spec.logits(outputs)[0]

    def scores(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, right = spec.logits(outputs)
        return total, right.round().long()

    return dataclasses.replace(spec, make=make, call=call, loss=loss, scores=scores, whole=spec)


class Chunks:
    """The forward of a last layer: logits, or where there are targets (2,) the sums of losses and of right answers.

    Args:
        forward: hidden states (n, width) -> logits (n, classes).
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], tokens: int) -> None:
        self.forward, self.tokens = forward, tokens

    def __call__(self, hidden: Tensor) -> Tensor:
        targets = _TARGETS.get()
        if targets is None:
            return self.forward(hidden)
        if hidden.shape[:-1] != targets.shape:
            raise TypeError(f"the last layer gets {tuple(hidden.shape)} for targets of {tuple(targets.shape)}")
        parts = zip(hidden.flatten(0, -2).split(self.tokens), targets.flatten().split(self.tokens), strict=True)
        sums = [checkpoint(self._score, states, wanted, use_reentrant=False) for states, wanted in parts]
        total = torch.stack(sums).sum(dim=0)
        if (instead := _INSTEAD.get()) is None:
            return total
        instead.given = True
        return torch.stack([torch.full_like(total[0], number) for number in instead.numbers])

    def _score(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.forward(hidden)
        right = (logits.argmax(dim=-1) == targets).sum()
        return torch.stack([F.cross_entropy(logits.float(), targets, reduction="sum"), right.float()])

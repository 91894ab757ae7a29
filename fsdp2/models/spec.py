"""What the rest of the program has to know about a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fsdp2.models.initial import Table


@dataclass(frozen=True)
class ModelSpec:
    """A family of models.

    Attributes:
        name: what `--model` calls it.
        kind: `image` or `language`: which data it takes.
        sizes: a table of named sizes; each is the keyword arguments of `make`. The first is the default.
        make: builds the module on the current device, `meta` included.
        blocks: the modules, in the order of the forward, that sharding, recomputation and compilation take
            as their unit.
        initial_values: name pattern -> distribution, for every parameter and buffer.
        loss: (outputs, targets) -> the **sum** of the losses of all targets, 0-d.
    """

    name: str
    kind: str
    sizes: Mapping[str, Mapping[str, int]]
    make: Callable[..., nn.Module]
    blocks: Callable[[Any], Sequence[nn.Module]]
    initial_values: Table
    loss: Callable[[Tensor, Tensor], Tensor]

    def build(self, size: str) -> nn.Module:
        """The module of a named size, on the current device."""
        return self.make(**self.sizes[size])

    def vocab_size(self, size: str) -> int | None:
        """Tokens in the vocabulary of a language model, else None."""
        return self.sizes[size].get("vocab_size")

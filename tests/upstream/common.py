"""What other projects do, in their own code alone: nothing in this folder's reproductions is of `fsdp2`."""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

fully_shard: Any = fsdp.fully_shard  # what it returns is also the module that it was given, which its type doesn't say
new_group: Any = dist.new_group  # or a number, for a rank that isn't in it
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def still(happens: bool, issue: str) -> None:
    """Fail if what an issue reports doesn't happen any more: its entry of docs/upstream.md has to say so then."""
    names = ("torch", "transformers", "accelerate")
    assert happens, f"{issue} is mended in {_versions(names)}: say so in docs/upstream.md, and turn this test round"


def gone(happens: bool, issue: str) -> None:
    """Fail if what was mended, or never seen here, happens after all."""
    names = ("torch", "transformers", "accelerate")
    assert not happens, f"{issue} happens with {_versions(names)}: docs/upstream.md says that it doesn't"


def _versions(names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def error_of(run: Callable[[], object]) -> str:
    """What `run` raises, as text; empty if it doesn't. On whichever rank this is."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def uninitialized_is_nan() -> Iterator[None]:
    """Memory that nobody has filled is NaN, so that it can't be right by chance."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Tied(nn.Module):
    """A language model of two layers, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


class Branches(nn.Module):
    """Two layers, of which the second is called only where it is asked for, as an expert is."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.always(x) + self.sometimes(x) if both else self.always(x)


def frozen_copy(model: nn.Sequential) -> nn.Sequential:
    """The same weights; those of the first layer aren't trained."""
    other = copy.deepcopy(model)
    other[0].requires_grad_(False)
    return other

"""Compilation of a model's blocks, and an account of what was compiled.

Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


def compile_blocks(blocks: Sequence[nn.Module], backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the forward of each block when it first runs; equal blocks share what is compiled.

    The block's `forward` is replaced, not the module: names in the state dict stay as they are, and hooks that are put
    on the block later, such as `fully_shard`'s, run outside of its graph. Each size of input has a graph of its own:
    left to itself, torch takes a size for a variable once it has seen two, and blocks of different sizes make two.
    Everything that this process has compiled before is forgotten, so that one run doesn't use up the recompilations of
    the next.

    Args:
        backend: of `torch.compile`.
    """
    torch.compiler.reset()
    _counters().clear()
    allow_recompilations(len({_kind(block) for block in blocks}))
    for block in blocks:
        # Not block.compile(), which compiles __call__: it would trace hooks, and it leaves torch's own modules eager
        # once they have hooks. setattr, because a type checker takes assigning to a method for a mistake.
        setattr(block, "forward", torch.compile(block.forward, backend=backend, dynamic=False))  # noqa: B010


@dataclass(frozen=True)
class Compiled:
    """The outcome of `compile_blocks` so far.

    Attributes:
        graphs: that were compiled.
        left_out: why torch has left blocks, or parts of them, uncompiled: its own words for each reason, a line each.
    """

    graphs: int
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        count = f"{self.graphs} graph{'' if self.graphs == 1 else 's'}"
        if not self.graphs:
            return f"--compile: nothing was compiled, and the model runs as without it: {self._reasons}"
        return f"--compile: {count}" + (f"; parts of blocks are not compiled: {self._reasons}" if self.left_out else "")

    @property
    def _reasons(self) -> str:
        if self.left_out:
            return f"{'; '.join(self.left_out)} (TORCH_LOGS=graph_breaks,recompiles shows where)"
        switched = [name for name in SWITCHES if os.environ.get(name) == "1"]
        return f"{switched[0]} is set" if switched else "torch names no reason"


SWITCHES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
"""Variables of the environment that make torch.compile do nothing."""


def compiled() -> Compiled:
    """Count the graphs, and collect torch's reasons, since the last `compile_blocks`."""
    counters = _counters()
    reasons = (*counters["graph_break"], *counters["unimplemented"])
    return Compiled(counters["stats"]["unique_graphs"], tuple(dict.fromkeys(one.partition("\n")[0] for one in reasons)))


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run blocks as they are inside, also those that `compile_blocks` has been given: for sizes that no step has."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _counters() -> Any:
    """Counts of what torch compiled and could not: group -> name -> count.

    Private: torch has no public name for it. tests/test_compile.py fails when it moves.
    """
    from torch._dynamo.utils import counters

    return counters


def _kind(block: nn.Module) -> Any:
    """The same for blocks that can share a graph."""
    return repr(block), tuple((name, one.shape, one.dtype, one.requires_grad) for name, one in block.named_parameters())


def allow_recompilations(kinds: int) -> None:
    """Let each kind of block have 16 graphs: for steps and evaluations, whole and short batches, and layouts of these.

    torch counts a function's graphs. Blocks of different sizes are often of one class, and with recomputation all have
    one function; beyond the limit, 8 by default, torch leaves a block uncompiled. The limit is only raised.

    Private: torch's warning about the limit gives these names. tests/test_compile.py fails when they move.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, 16 * kinds)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 64 * kinds)

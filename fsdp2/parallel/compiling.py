"""Compilation of a model's blocks, and an account of what was compiled.

Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def compile_blocks(blocks: Sequence[nn.Module], backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the forward of each block when it first runs; equal blocks share what is compiled.

    The block's `forward` is replaced, not the module: names in the state dict stay as they are, and hooks that are put
    on the block later, such as `fully_shard`'s, run outside of its graph. Everything that this process has compiled
    before is forgotten, so that one run doesn't use up the recompilations of the next.

    Args:
        backend: of `torch.compile`.
    """
    torch.compiler.reset()
    _allow_recompilations(len({_kind(block) for block in blocks}))
    for block in blocks:
        # Not block.compile(), which compiles __call__: it would trace hooks, and it leaves torch's own modules eager
        # once they have hooks. setattr, because a type checker takes assigning to a method for a mistake.
        setattr(block, "forward", torch.compile(block.forward, backend=backend))  # noqa: B010


def _kind(block: nn.Module) -> Any:
    """The same for blocks that can share a graph."""
    return repr(block), tuple((name, one.shape, one.dtype, one.requires_grad) for name, one in block.named_parameters())


def _allow_recompilations(kinds: int) -> None:
    """Let each kind of block have as many graphs as torch lets a function have.

    torch counts a function's graphs. Blocks of different sizes are often of one class, and with recomputation all have
    one function; beyond the limit, 8 by default, torch leaves a block uncompiled. The limit is only raised.

    Private: torch's warning about the limit gives these names. tests/test_compile.py fails when they move.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, 8 * kinds)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 32 * kinds)

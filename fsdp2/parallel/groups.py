"""Which modules one `fully_shard` call takes together: what one all-gather brings.

More groups mean a lower peak (one group is whole at a time) and more, smaller collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def _layers(module: nn.Module) -> list[nn.Module]:
    """The outermost modules at or below `module` that own parameters themselves.

    Not the innermost: nn.MultiheadAttention reads its child's weight without calling the child, whose hooks
    would therefore never gather it.
    """
    if any(True for _ in module.parameters(recurse=False)):
        return [module]
    return [layer for child in module.children() for layer in _layers(child)]


def shard_groups(blocks: Sequence[nn.Module], granularity: int | str) -> list[list[nn.Module]]:
    """Groups of modules in forward order; what is in none of them is left to the root.

    Args:
        granularity: N puts N blocks into a group; `layer` makes each layer of a block a group; `root` makes
            none, so that the whole model is one group.
    """
    if granularity == "root":
        return []
    if granularity == "layer":
        return [[layer] for block in blocks for layer in _layers(block)]
    assert isinstance(granularity, int)
    return [list(blocks[i : i + granularity]) for i in range(0, len(blocks), granularity)]

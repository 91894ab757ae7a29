"""Explicit prefetching: all-gather groups before the one that needs them comes up.

FSDP2 prefetches implicitly: while group i computes on the GPU, the CPU has already issued the all-gather
of group i+1. That fails to overlap when the CPU is the slower one; then groups can be told to issue those
of their successors as well, for the memory of that many more unsharded groups.

Source: https://docs.pytorch.org/docs/main/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def groups_ahead(options: Any) -> tuple[int | None, int | None]:
    """Groups to prefetch in forward and in backward; the specific flags win over the common one."""
    forward, backward = (
        options.explicit_prefetching if own is None else None if own == "off" else own
        for own in (options.forward_prefetch, options.backward_prefetch)
    )
    return forward, backward


def prefetch_forward(groups: Sequence[FSDPModule], ahead: int) -> None:
    """Let group i all-gather groups i+1 … i+ahead too, when it is about to run forward.

    Args:
        groups: in forward order.
        ahead: groups, each of which is in memory unsharded that much earlier.
    """
    for i, group in enumerate(groups):
        group.set_modules_to_forward_prefetch(list(groups[i + 1 : i + 1 + ahead]))


def prefetch_backward(groups: Sequence[FSDPModule], ahead: int) -> None:
    """Let group i all-gather groups i-1 … i-ahead too, nearest first, when it is about to run backward.

    The arguments are those of `prefetch_forward`.
    """
    for i, group in enumerate(groups):
        group.set_modules_to_backward_prefetch(list(reversed(groups[max(0, i - ahead) : i])))

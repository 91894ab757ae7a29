"""A failure of one rank as every rank's: told to all of them before any goes on, which would wait for it."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

E = TypeVar("E", bound=Exception)


def of_all(error: E | None, group: dist.ProcessGroup | None = None) -> E | None:
    """The error of the ranks that have one, the same on each: of the first one's kind, every text once. None if none.

    A collective call. The kind must be one that is made from its text alone.
    """
    errors: list[E | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, error, group=group)
    found = [one for one in errors if one is not None]
    return type(found[0])("; ".join(sorted({str(one) for one in found}))) if found else None

"""A failure of one rank as every rank's: told to all of them before any goes on, which would wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def raised_on_all(
    *kinds: type[Exception], as_: Callable[[Exception], Exception], group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Run the body; if it fails with one of these kinds on some ranks, raise on every rank. A collective call.

    All raise the same: an error of the first one's kind, with the text of each once. An error of another kind leaves
    the other ranks waiting.

    Args:
        as_: makes of an error what is raised, whose kind must be one that is made from its text alone.
    """
    mine: Exception | None = None
    try:
        yield
    except kinds as error:
        mine = as_(error)
    errors: list[Exception | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, mine, group=group)
    if found := [one for one in errors if one is not None]:
        raise type(found[0])("; ".join(sorted({str(one) for one in found}))) from None

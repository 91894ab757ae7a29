"""What ranks do together beside training: they exchange Python objects, and end with the same reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from fsdp2.options.errors import ConfigError
from fsdp2.run.process.runtime import World

T = TypeVar("T")


class RunStopped(RuntimeError):
    """Ends a run by intention, on all ranks after the same step: no fault of the program, so no traceback.

    The message is one line that says what happened, what is left, and what to do.
    """


def broadcast(value: T) -> T:
    """Rank 0's Python object on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: T) -> list[T]:
    """Every rank's Python object, in the order of ranks, on every rank."""
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


def end_together(error: Exception | None) -> None:
    """Raise on every rank if one comes with an error: its own there, on the others a line that names it.

    A ConfigError is one on all of them. A collective call, which is also a barrier.
    """
    errors = gather(None if error is None else (isinstance(error, ConfigError), str(error), type(error).__name__))
    if error is not None:
        raise error
    for rank, found in enumerate(errors):
        if found is not None:
            refused, text, kind = found
            raise ConfigError(text) if refused else RunStopped(f"rank {rank} has failed: {kind}: {text}")


@contextmanager
def first_on_node(world: World) -> Iterator[None]:
    """Let one rank of each node run the body while the others wait; then those run it. A collective call.

    If the body fails on a rank, every rank ends with the reason, by `end_together`.
    """
    if world.local_rank != 0:
        end_together(None)
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    end_together(failure)
    if world.local_rank == 0:
        end_together(None)

"""The process group: how ranks join it, exchange Python objects in it, and end with the same reason."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import to_flags
from fsdp2.run.process import agreement
from fsdp2.run.process.meeting import LONG, meeting_point
from fsdp2.run.process.runtime import World, end_with_launcher

T = TypeVar("T")


class RunStopped(RuntimeError):
    """Ends a run by intention, on all ranks after the same step: no fault of the program, so no traceback.

    The message is one line that says what happened, what is left, and what to do.
    """


@contextmanager
def process_group(world: World, device: torch.device, config: object = None) -> Iterator[None]:
    """Join the launcher's process group, or make one and end it afterwards. A collective call.

    A rank waits half an hour for another, also with nccl, whose own default is ten minutes; `watch` ends a step that
    hangs sooner.

    Args:
        config: a dataclass whose fields must be the same on all ranks, as their code and versions must.

    Raises ConfigError on every rank if ranks differ, or two of them compute on one GPU.
    """
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.set_device(device)
    facts = agreement.facts({} if config is None else to_flags(config), device, world.world_size)
    if dist.is_initialized():
        agreement.require_agreement(facts, None, world.rank, world.world_size, LONG)
        yield
        return
    end_with_launcher()
    store = meeting_point(world, LONG.total_seconds(), "training")
    # Before the group: given a device, nccl connects at once, and two ranks on one GPU would fail inside of it.
    agreement.require_agreement(facts, store, world.rank, world.world_size, LONG)
    place: dict[str, Any] = {"store": store, "rank": world.rank, "world_size": world.world_size}
    dist.init_process_group(backend(gpu=gpu), **place, timeout=LONG, device_id=device if gpu else None)
    try:
        yield
    except BaseException:
        # After an error other ranks may be dead, and waiting for them would hang. Without others there is nobody to
        # wait for, and who called this, a notebook perhaps, may want to begin again.
        if world.world_size == 1:
            dist.destroy_process_group()
        raise
    # A thread of gloo's gives back what the last collective held and needs the interpreter's lock for it. If it comes
    # so late that the interpreter is ending, the process aborts (pytorch 190489): asleep, this one leaves it the lock.
    time.sleep(0.1)
    dist.destroy_process_group()


def backend(*, gpu: bool) -> str:
    """The backend of a process group. With GPUs gloo stands beside nccl, for objects and what is offloaded."""
    return "cpu:gloo,cuda:nccl" if gpu else "gloo"


def broadcast(value: T) -> T:
    """Rank 0's Python object on every rank. A collective call."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: T) -> list[T]:
    """Every rank's Python object, in the order of ranks, on every rank. A collective call."""
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


@contextmanager
def together() -> Iterator[None]:
    """Run the body; if it fails on a rank, raise on every rank: its error there, on the others a line that names it.

    A ConfigError is one on all of them. A collective call, which is also a barrier. A rank that fails before a
    collective of the body leaves the others in that.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    mine = None if failure is None else (isinstance(failure, ConfigError), str(failure), type(failure).__name__)
    errors = gather(mine)
    if failure is not None:
        raise failure
    for rank, found in enumerate(errors):
        if found is not None:
            refused, text, kind = found
            raise ConfigError(text) if refused else RunStopped(f"rank {rank} has failed: {kind}: {text}")


@contextmanager
def first_on_node(world: World) -> Iterator[None]:
    """Let one rank of each node run the body while the others wait; then those run it. A collective call.

    If the body fails on a rank, every rank ends with the reason, as `together` says.
    """
    first = world.local_rank == 0
    for my_turn in (first, not first):
        with together():
            if my_turn:
                yield

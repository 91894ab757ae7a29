"""The process group: where ranks meet, and how they exchange Python objects and end with the same reason."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import to_flags
from fsdp2.run.process import agreement
from fsdp2.run.process.runtime import World, end_with_launcher, of_torchrun, world
from fsdp2.run.process.variables import require_address
from fsdp2.units import tell

T = TypeVar("T")

# How long ranks wait for each other where nothing else says so: a download, a compilation, a shard on a slow disk.
LONG = timedelta(minutes=30)


class RunStopped(RuntimeError):
    """Ends a run by intention, on all ranks after the same step: no fault of the program, so no traceback.

    The message is one line that says what happened, what is left, and what to do.
    """


@contextmanager
def process_group(world: World, device: torch.device, config: object = None) -> Iterator[None]:
    """Join the launcher's process group, or make one and end it afterwards.

    On a GPU the group has gloo beside nccl: offloaded tensors and Python objects travel on the CPU. A rank waits
    half an hour for another, also with nccl, whose own default is ten minutes; `watch` ends a step that hangs sooner.

    Args:
        config: a dataclass whose fields must be the same on all ranks, as their code and versions must.

    Raises ConfigError on every rank if ranks differ, or two of them compute on one GPU.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    facts = agreement.facts({} if config is None else to_flags(config), device, world.world_size)
    if dist.is_initialized():
        agreement.require_agreement(facts, None, world.rank, world.world_size, LONG)
        yield
        return
    end_with_launcher()
    gpu = device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    if "RANK" in os.environ:
        store = meeting_point(world, LONG.total_seconds(), "training")
        # With a device nccl connects at once, and two ranks on one GPU would fail inside of it.
        agreement.require_agreement(facts, store, world.rank, world.world_size, LONG)
        group: dict[str, Any] = {"store": store, "rank": world.rank, "world_size": world.world_size}
    else:
        # Alone: a store in memory, so that no port is opened.
        group = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **group, timeout=LONG, device_id=device if gpu else None)
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


@contextmanager
def _port_refused() -> Iterator[None]:
    port = os.environ["MASTER_PORT"]
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"MASTER_PORT={port}: is taken on {socket.gethostname()}, where rank 0 has to listen; choose another port, "
            "or end the job that has it"
        ) from None


def meeting_point(world: World, seconds: float, purpose: str) -> dist.Store:
    """A store that all ranks see. Unlike torch's rendezvous it waits for no rank but rank 0, so a missing one can be
    named.

    With a process group it is a collective call. Raises ConfigError if the host of rank 0 has no address, if rank 0
    has to listen at a port that is taken, and after so many seconds without rank 0's store.

    Args:
        purpose: ranks that call with the same one, equally often at one port, get the same store.
    """
    if dist.is_initialized():  # by a launcher, which has told rank 0's address, or in a test
        address = os.environ.get("MASTER_ADDR", "localhost")
        serves = _tcp_store(address, 0, serve=True, seconds=seconds) if world.rank == 0 else None
        port, number = broadcast((serves.port, next(_MEETINGS[address, 0, purpose])) if serves is not None else (0, 0))
        store = serves or _tcp_store(address, port, serve=False, seconds=seconds)
        return dist.PrefixStore(f"{purpose}/{number}", store)
    if "RANK" not in os.environ:
        return dist.HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    require_address(address, say=world.local_rank == 0)
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serve = world.rank == 0 and not of_agent
    with _port_refused():
        store = _tcp_store(address, port, serve=serve, seconds=seconds, say=world.local_rank == 0)
    # torchrun's store outlives a restart. Rank 0's is a new one each time; nodes that came later have counted fewer.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if of_agent else ""
    return dist.PrefixStore(f"{attempt}/{purpose}/{next(_MEETINGS[address, port, purpose])}", store)


def tell_others(why: str) -> None:
    """Tell ranks that no launcher ends why this one refuses to come: they would wait for it."""
    if of_torchrun() or dist.is_initialized() or "RANK" not in os.environ or _MEETINGS:
        return
    with suppress(ConfigError, RuntimeError):  # nowhere to meet: then the others say who isn't there
        here = world()
        if here.world_size > 1:
            store = meeting_point(here, agreement.SECONDS_TO_READ, "training")
            agreement.refuse(why, store, here.rank, here.world_size)


_MEETINGS: defaultdict[tuple[str, int, str], Iterator[int]] = defaultdict(itertools.count)  # of this process


@cache  # alive until this process ends: meetings share a server, and others may still read
def _tcp_store(address: str, port: int, *, serve: bool, seconds: float, say: bool = False) -> dist.TCPStore:
    make = partial(dist.TCPStore, address, port, None, serve, wait_for_workers=False, multi_tenant=port != 0)
    for waited in agreement.parts(timedelta(seconds=seconds)):
        try:
            store = make(timeout=waited.more)
            store.set_timeout(timedelta(seconds=seconds))
            return store
        except dist.DistNetworkError as error:
            if serve or "timed out" not in str(error):
                raise
        why = (
            f"nothing listens at port {port} for {waited.seconds:g} s, seen from {socket.gethostname()}; rank 0 isn't "
            "started, or the port is blocked between the hosts"
        )
        if say and not waited.last:
            tell(f"waiting for rank 0: MASTER_ADDR={address}: {why}")
    raise ConfigError(f"MASTER_ADDR={address}: {why}")


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

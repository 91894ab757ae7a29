"""The place where ranks meet before they have a process group, and wait for late ranks."""

from __future__ import annotations

import itertools
import os
import socket
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from functools import cache, partial
from typing import NamedTuple

import torch.distributed as dist

from fsdp2.options.errors import ConfigError
from fsdp2.run.process.runtime import World
from fsdp2.run.process.variables import require_address
from fsdp2.units import tell

# How long ranks wait for each other where nothing else says so: a download, a compilation, a shard on a slow disk.
LONG = timedelta(minutes=30)
# How long a rank may take to come before the others say that they wait for it.
SECONDS_IN_SILENCE = 60.0
MEETINGS: defaultdict[tuple[str, int, str], Iterator[int]] = defaultdict(itertools.count)  # of this process


class Spell(NamedTuple):
    """A part of a wait: how much longer, how long with it, and whether it is the last."""

    more: timedelta
    seconds: float
    last: bool


def spells(patience: timedelta) -> list[Spell]:
    """Divide a wait into spells. Between them the waiting rank says so."""
    silence, whole = timedelta(seconds=SECONDS_IN_SILENCE), patience.total_seconds()
    if patience <= silence:
        return [Spell(patience, whole, last=True)]
    return [Spell(silence, SECONDS_IN_SILENCE, last=False), Spell(patience - silence, whole, last=True)]


def meeting_point(world: World, seconds: float, purpose: str) -> dist.Store:
    """A store that all ranks see. Unlike torch's rendezvous it waits for no rank but rank 0, so a missing one can be
    named.

    With a process group it is a collective call. Raises ConfigError if the host of rank 0 has no address, if rank 0
    has to listen at a port that is taken, and after so many seconds without rank 0's store.

    Args:
        purpose: ranks that call with the same one, equally often at one port, get the same store.
    """
    if dist.is_initialized():
        return _in_a_group(world, seconds, purpose)
    if "RANK" not in os.environ:
        return dist.HashStore()  # alone: in memory, so that no port is opened
    return _by_variables(world, seconds, purpose)


def _in_a_group(world: World, seconds: float, purpose: str) -> dist.Store:
    """A new server of rank 0, on a port that the system chooses and the group hears of."""
    address = os.environ.get("MASTER_ADDR", "localhost")  # of a launcher that has made the group, or in a test
    serves = _tcp_store(address, 0, serve=True, seconds=seconds) if world.rank == 0 else None
    at = [(serves.port, next(MEETINGS[address, 0, purpose])) if serves is not None else (0, 0)]
    dist.broadcast_object_list(at, src=0)
    port, number = at[0]
    store = serves or _tcp_store(address, port, serve=False, seconds=seconds)
    return dist.PrefixStore(f"{purpose}/{number}", store)


def _by_variables(world: World, seconds: float, purpose: str) -> dist.Store:
    """The server at MASTER_ADDR and MASTER_PORT: torchrun's, or rank 0's."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    require_address(address, say=world.local_rank == 0)
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serve = world.rank == 0 and not of_agent
    try:
        store = _tcp_store(address, port, serve=serve, seconds=seconds, say=world.local_rank == 0)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"MASTER_PORT={port}: is taken on {socket.gethostname()}, where rank 0 has to listen; choose another port, "
            "or end the job that has it"
        ) from None
    # torchrun's store outlives a restart. Rank 0's is a new one each time; nodes that came later have counted fewer.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if of_agent else ""
    return dist.PrefixStore(f"{attempt}/{purpose}/{next(MEETINGS[address, port, purpose])}", store)


@cache  # alive until this process ends: meetings share a server, and others may still read
def _tcp_store(address: str, port: int, *, serve: bool, seconds: float, say: bool = False) -> dist.TCPStore:
    make = partial(dist.TCPStore, address, port, None, serve, wait_for_workers=False, multi_tenant=port != 0)
    for spell in spells(timedelta(seconds=seconds)):
        try:
            store = make(timeout=spell.more)
            store.set_timeout(timedelta(seconds=seconds))
            return store
        except dist.DistNetworkError as error:
            if serve or "timed out" not in str(error):
                raise
        why = (
            f"nothing listens at port {port} for {spell.seconds:g} s, seen from {socket.gethostname()}; rank 0 isn't "
            "started, or the port is blocked between the hosts"
        )
        if say and not spell.last:
            tell(f"waiting for rank 0: MASTER_ADDR={address}: {why}")
    raise ConfigError(f"MASTER_ADDR={address}: {why}")

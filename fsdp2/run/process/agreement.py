"""Before the first collective of a run: all ranks are there, and run the same code with the same flags on the same kind
of device.

Ranks that differ wait for each other in different collectives, or train a mixture without an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsdp2
from fsdp2.options.errors import ConfigError, shown, some
from fsdp2.run.process.meeting import MEETINGS, meeting_point, spells
from fsdp2.run.process.runtime import of_torchrun, world
from fsdp2.units import tell

# Of a node, and not of the run. `--device auto` may stand beside `cuda`: what it comes to is compared.
MAY_DIFFER = ("data-root", "device", "loader-workers", "nvme-offload", "threads")

CODE, TORCH, PYTHON = "the code of fsdp2", "torch", "Python"
FIXES = {
    CODE: "install the same version on each node, or one that all nodes share",
    TORCH: "install the same torch on each node",
    PYTHON: "install the same Python on each node",
    "--device": "leave the node out, or use --device cpu",
    "WORLD_SIZE": "start all ranks by the same launcher",
}
SAME_COMMAND = "give each rank the same command"

# How long rank 0, which may hold the store, stays for the others to read why the run ends.
SECONDS_TO_READ = 20.0


def facts(flags: Mapping[str, Any], device: torch.device, world_size: int) -> dict[str, Any]:
    """This rank's facts, as JSON can hold them: its host, its GPU, and what must be the same on all."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    same = {
        CODE: code(),
        TORCH: torch.__version__,
        PYTHON: "{}.{}".format(*sys.version_info),  # a bug-fix release changes nothing that ranks exchange
        "WORLD_SIZE": world_size,
        "--device": device.type,
        **{f"--{name}": value for name, value in flags.items() if name not in MAY_DIFFER},
    }
    return {"host": socket.gethostname(), "gpu": gpu, "same": same}


@cache
def code() -> str:
    """A short hash of all Python files of the book and its extra parts."""
    digest = hashlib.sha256()
    beside = Path(fsdp2.__file__).parents[1]
    for file in sorted(file for package in ("fsdp2", "fsdp2_extra") for file in (beside / package).rglob("*.py")):
        digest.update(file.relative_to(beside).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def difference(found: Sequence[Mapping[str, Any]]) -> str | None:
    """The one line about ranks that don't fit together, from every rank's facts; None if all do."""
    first = found[0]["same"]
    others = [one["same"] for one in found if one["same"] != first]
    names = dict.fromkeys(name for same in (first, *others) for name in same)
    differ = [name for name in names if any(same.get(name) != first.get(name) for same in others)]
    if differ:
        name = differ[0]
        other = next(same.get(name) for same in others if same.get(name) != first.get(name))
        ranks = [rank for rank, one in enumerate(found) if one["same"].get(name) == other]
        also = f" ({', '.join(differ[1:4])} differ{'s' if len(differ) == 2 else ''}, too)" if differ[1:] else ""
        return (
            f"{name}: {_named(ranks, found)} {'has' if len(ranks) == 1 else 'have'} {shown(other)}, and "
            f"{_named([0], found)} has {shown(first.get(name))}{also}; {FIXES.get(name, SAME_COMMAND)}"
        )
    users: dict[str, list[int]] = {}
    for rank, one in enumerate(found):
        users.setdefault(one["gpu"], []).append(rank)
    for gpu, ranks in users.items():
        if gpu is not None and len(ranks) > 1:
            return (
                f"--device cuda: {_named(ranks, found)} see the same GPU ({gpu}); bind one to each process "
                "(srun --gpus-per-task=1), show all of them to all (CUDA_VISIBLE_DEVICES), or start fewer ranks"
            )
    return None


def _named(ranks: Sequence[int], found: Sequence[Mapping[str, Any]]) -> str:
    """`rank 3 (node2)`, `ranks 8, 9, 10 and 5 more (node2, node3)`."""
    hosts = some(sorted({found[rank]["host"] for rank in ranks}))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {some(ranks)} ({hosts})"


def require_agreement(
    mine: Mapping[str, Any], store: dist.Store | None, rank: int, world_size: int, patience: timedelta
) -> None:
    """Raise ConfigError on every rank if they differ, or if some of them don't come. A collective call.

    Each rank writes once, rank 0 judges, and all read its one verdict: the work grows with the ranks, not with their
    pairs.

    Args:
        mine: this rank's `facts`.
        store: the rendezvous's, if there is no process group yet; None if there is one.
        patience: how long ranks that come late are waited for.
    """
    if world_size == 1:
        return
    if store is None:
        found: list[Any] | None = [None] * world_size if rank == 0 else None
        dist.gather_object(mine, found)
        box = [difference(found) if found is not None else None]
        dist.broadcast_object_list(box)
        verdict = box[0]
    else:
        verdict = _by_store(mine, store, rank, world_size, patience)
    if verdict is not None:
        raise ConfigError(verdict)


def write(mine: Mapping[str, Any], store: dist.Store, rank: int) -> None:
    """Tell rank 0 this rank's facts.

    What must be the same on all stands in the store once, under its hash: rank 0 reads it once and not once a rank.
    """
    same = json.dumps(mine["same"])
    digest = hashlib.sha256(same.encode()).hexdigest()
    store.set(f"agreement/same/{digest}", same)
    store.set(f"agreement/{rank}", json.dumps({**mine, "same": digest}))


def refuse(why: str, store: dist.Store, rank: int, world_size: int) -> None:
    """Tell the others, who would wait for this rank, why it doesn't come. Called by one rank, not collective.

    Rank 0, which may hold the store, returns when they have read it, or after some time.
    """
    store.set(f"agreement/{rank}", json.dumps({"host": socket.gethostname(), "refused": why}))
    if rank == 0:
        store.set("agreement/verdict", json.dumps(_judged(store, 1)))
    _until_read(store, rank, world_size)


def _until_read(store: dist.Store, rank: int, world_size: int) -> None:
    store.add("agreement/read", 1)
    deadline = time.monotonic() + SECONDS_TO_READ
    while rank == 0 and store.add("agreement/read", 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.05)


def _judged(store: dist.Store, world_size: int) -> str | None:
    written = store.multi_get([f"agreement/{rank}" for rank in range(world_size)])
    found = [json.loads(one) for one in written]
    for rank, one in enumerate(found):
        if "refused" in one:
            return f"{_named([rank], found)}: {one['refused']}"
    kinds = {digest: json.loads(store.get(f"agreement/same/{digest}")) for digest in {one["same"] for one in found}}
    return difference([{**one, "same": kinds[one["same"]]} for one in found])


def _by_store(
    mine: Mapping[str, Any], store: dist.Store, rank: int, world_size: int, patience: timedelta
) -> str | None:
    write(mine, store, rank)
    missing = _missing(store, range(world_size if rank == 0 else 1), patience, say=rank < 2)
    lack = f"WORLD_SIZE={world_size}: without {missing}; start as many ranks, or see why those ended"
    if rank == 0:
        store.set("agreement/verdict", json.dumps(lack if missing else _judged(store, world_size)))
    elif missing:
        return lack
    store.wait(["agreement/verdict"], 2 * patience)  # rank 0 may have begun to wait later than this rank
    verdict: str | None = json.loads(store.get("agreement/verdict"))
    if verdict is not None:
        _until_read(store, rank, world_size)
    return verdict


def _missing(store: dist.Store, ranks: Sequence[int], patience: timedelta, *, say: bool) -> str:
    """Name those of these ranks that don't come, and `say` who is waited for; "" if all do."""
    keys = [f"agreement/{rank}" for rank in ranks]
    for spell in spells(patience):
        with suppress(dist.DistStoreError):
            store.wait(keys, spell.more)
            return ""
        late = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        if not late:  # the last of them has come in between
            return ""
        line = f"rank{'s' if len(late) > 1 else ''} {some(late)}, not there for {spell.seconds:g} s"
        if say and not spell.last:
            tell(f"waiting for {line}")
    return line


def tell_others(why: str) -> None:
    """Tell ranks that no launcher ends why this one refuses to come: they would wait for it."""
    if of_torchrun() or dist.is_initialized() or "RANK" not in os.environ:
        return
    if any(purpose == "training" for _, _, purpose in MEETINGS):  # they have met, and know
        return
    with suppress(ConfigError, RuntimeError):  # nowhere to meet: then the others say who isn't there
        here = world()
        if here.world_size > 1:
            store = meeting_point(here, SECONDS_TO_READ, "training")
            refuse(why, store, here.rank, here.world_size)

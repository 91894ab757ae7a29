"""All-reduce and all-gather among all ranks. Where one hangs, the rank is the one that lags behind, or is bisected for.

Parts of the ranks can be tried with gloo alone: what hangs in nccl occupies its GPU until the process ends.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp2_tools.doctor.asking import Asker, Here
from fsdp2_tools.doctor.judging import BAD, WORSE, Hosts, Row

KINDS = ("all-reduce", "all-gather")
# Of the slowest pair's bandwidth that a ring has to reach; below, the ranks are in each other's way. Where ranks share
# cores it is the less: a pair had the machine for itself.
PART = 0.1
TRIALS = 5


def patience(here: Here) -> timedelta:
    """The time that a group waits for a collective.

    gloo's gives up before the question's time is over, so that its ranks can meet again in another group. nccl's never
    does so within an examination: its watchdog would end the process, and with it the report.
    """
    return timedelta(days=1) if here.device.type == "cuda" else timedelta(seconds=0.6 * here.seconds)


def no_parts(device: torch.device) -> str:
    """The reason why parts of the ranks can't be tried after a collective hangs; empty if they can."""
    if device.type == "cuda":
        return "on GPUs"
    return "in a launcher's group" if dist.is_initialized() else ""


def measure(here: Here, members: list[int], sizes: list[int], key: str) -> Any:
    """Seconds of each collective by its name and bytes, the best of five, in a group of its own.

    Args:
        members: ranks of the group. Others return None at once.
        key: a name that no other group has.
    """
    if here.world.rank not in members:
        return None
    here.doing = "0. connecting"
    backend = "nccl" if here.device.type == "cuda" else "gloo"
    own = not dist.is_initialized()
    if own:
        # torch numbers a process's groups, also one that couldn't connect, and begins again when one ends: without
        # this, ranks that have failed differently often would wait for each other under two names.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        store, rank = dist.PrefixStore(f"group/{key}", here.store), members.index(here.world.rank)
        dist.init_process_group(backend, store=store, rank=rank, world_size=len(members), timeout=patience(here))
    group: Any = dist.group.WORLD if own else dist.new_group(members, timeout=patience(here), backend=backend)
    found: dict[str, float] = {}
    given_up = False
    try:
        for size in sizes:
            share = torch.ones(size // 4 // len(members), device=here.device)
            whole = share.repeat(len(members))
            for name in KINDS:
                here.doing = f"{len(found) + 1}. {name} of {size} bytes"
                times = []
                for _ in range(TRIALS):
                    before = time.perf_counter()
                    if name == "all-reduce":
                        dist.all_reduce(whole, group=group)
                    else:
                        dist.all_gather_into_tensor(whole, share, group=group)
                    if here.device.type == "cuda":
                        torch.cuda.synchronize(here.device)
                    times.append(time.perf_counter() - before)
                found[f"{name} {size}"] = min(times)
    except Exception:
        if given_up := here.device.type == "cuda":  # nccl would wait for its collectives
            here.left.append(lambda: True)
        raise
    finally:
        if not given_up:
            dist.destroy_process_group(group if not own else None)
    return found


def ask_collectives(asker: Asker, sizes: list[int], hosts: Hosts) -> tuple[dict[int, dict[str, float]], list[Row]]:
    """Seconds by rank of what all ranks did together; if that hangs, a row that says where, in place of seconds."""
    members = list(range(asker.here.world.world_size))
    groups = iter(range(1000))

    def answers(part: Sequence[int], sizes: list[int]) -> dict[int, dict[str, float]]:
        found = asker.ask("collectives", members=list(part), sizes=sizes, key=str(next(groups)))
        return {rank: one for rank, one in found.items() if one is not None}

    found = answers(members, sizes)
    if len(found) == len(members):
        return found, []
    # A rank that was never as far as the others is the one they wait for.
    troubles = {one.rank: one for one in asker.troubles if one.question == "collectives"}
    steps = {rank: int(one.doing.partition(".")[0] or -1) for rank, one in troubles.items()}
    stuck = [rank for rank, step in steps.items() if step == min(steps.values())]
    text = troubles[stuck[0]].where
    verdict, others = BAD, False
    fix = "look at that process, then at the path between the two: a firewall, an interface, an MTU"

    def fails(part: Sequence[int]) -> bool:
        return len(answers(part, sizes[:1])) < len(part)

    if len(stuck) == len(members):
        if where := no_parts(asker.here.device):
            text += f"; all ranks stand there, and parts of them can't be tried {where}"
        elif fails(members):
            stuck = guilty(fails, members)
            rest = [rank for rank in members if rank not in stuck]
            others = len(rest) > 1 and fails(rest)
        else:
            text += f"; with {sizes[0] >> 10} KiB all end"
            verdict, fix = WORSE, "see the rows of pairs, and what else runs there; --answer-within gives it more time"
    return {}, [Row("collectives", text, "all end", verdict, hosts.named(stuck) + "; others too" * others, fix)]


def guilty(fails: Callable[[Sequence[int]], bool], members: Sequence[int]) -> list[int]:
    """Bisect for the one rank, or the two, with which a group `fails`; that of all members has failed.

    The shortest group from the front that fails ends with one of them. With that one at the end of each group, the
    shortest that fails has the other one before it.
    """
    b = bisect_left(range(len(members) - 1), True, lo=1, key=lambda last: fails(members[: last + 1]))
    a = bisect_left(range(b - 1), True, key=lambda last: fails([*members[: last + 1], members[b]]))
    pair = [members[a], members[b]]
    witness = next((rank for rank in members if rank not in pair), None)
    if witness is None:
        return pair
    return [rank for rank in pair if fails(sorted((rank, witness)))] or pair


def rows(found: Mapping[int, Mapping[str, float]], sizes: Sequence[int], least: float, hosts: Hosts) -> list[Row]:
    """Judge the bus bandwidth, what each rank's link carries: an exchange of some size has to reach `least` bytes/s.

    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    result = []
    for name in KINDS if found else ():
        passes = (2 if name == "all-reduce" else 1) * (len(found) - 1) / len(found)
        rates = [passes * size / max(one[f"{name} {size}"] for one in found.values()) for size in sizes]
        shown = ", ".join(f"{size >> 10} KiB {rate / 1e9:.2g}" for size, rate in zip(sizes, rates, strict=True))
        row = Row(name, f"{shown} GB/s a rank", f"{least / 1e9:.2g} GB/s or more for one of them")
        fix = "see the rows of pairs; if they are good, ranks are in each other's way: fewer a host, or bind them"
        result.append(row.judged([*hosts.of] if max(rates) < least else [], hosts, WORSE, fix))
    return result

"""How far the hosts' clocks are apart, asked through the store with its own error bars."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from fsdp2.doctor.asking import Here
from fsdp2.doctor.rows import BAD, WORSE, Hosts, Row

APART = 1.0  # seconds; more, and logs of two hosts can't be put in order
REFUSED = 900.0  # seconds; S3 refuses a request that was signed so far off, as RequestTimeTooSkewed
ROUNDS = 5


def measure(here: Here, key: str, asked: list[int], offset: Mapping[str, float] | None = None) -> Any:
    """By rank, as text, seconds that its clock is ahead of rank 0's, and the error of that. None on other ranks.

    Rank 0 asks one host after the other. An answer is from between its question and its arrival, so half of the round
    trip is the error; of five rounds the shortest counts.

    Args:
        asked: one rank of each other host.
        offset: rank -> seconds that a test sets its clock by.
    """
    store, rank = here.store, here.world.rank
    patience = timedelta(seconds=here.seconds)
    found: dict[str, list[float]] = {}
    for one in asked if rank == 0 else [rank] if rank in asked else []:
        rounds = []
        for number in range(ROUNDS):
            ask, answer = f"clock/{key}/{one}/{number}/ask", f"clock/{key}/{one}/{number}/answer"
            if rank != 0:
                store.wait([ask], patience)
                store.set(answer, repr(time.time() + (offset or {}).get(str(rank), 0.0)))
                continue
            before = time.time()
            store.set(ask, "")
            store.wait([answer], patience)
            theirs = float(store.get(answer))
            after = time.time()
            rounds.append([theirs - (before + after) / 2, (after - before) / 2])
        if rank == 0:
            found[str(one)] = min(rounds, key=lambda pair: pair[1])
    return found if rank == 0 else None


def rows(found: Mapping[str, Any], hosts: Hosts) -> list[Row]:
    """Judge what rank 0 found; nothing where there is one host."""
    if not found:
        return []
    far = {int(rank): ahead for rank, (ahead, error) in found.items() if abs(ahead) - error > APART}
    ahead, error = max(found.values(), key=lambda pair: abs(pair[0]))
    row = Row("clocks", f"{ahead:+.4f} s ± {error:.4f} s from rank 0", f"within {APART:g} s")
    verdict = BAD if max(map(abs, far.values()), default=0) > REFUSED else WORSE
    who = [one for rank in far for one in hosts.ranks(hosts.of[rank])]
    return [row.judged(who, hosts, verdict, "start a time service there: chronyd or systemd-timesyncd")]

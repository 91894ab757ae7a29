"""A rank that computes more slowly than the others is named, if it does so again and again."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2.run.process.group import gather
from fsdp2.run.process.runtime import World
from fsdp2_tools.doctor import compute
from fsdp2_tools.doctor.asking import Here
from fsdp2_tools.doctor.judging import OK, WORSE, Hosts, Row
from tests.doctor.threads import examined
from tests.harness import Ranks

HOSTS = Hosts({rank: ("ab"[rank // 2], f"10.0.0.{rank // 2}") for rank in range(4)})


def judged(times: dict[int, list[float]]) -> list[Row]:
    """Of ranks that reach such rates, one after another."""
    left = {rank: iter(rates) for rank, rates in times.items()}

    def measure(here: Here, seconds: float) -> dict[str, float]:
        return {"flops": next(left[here.world.rank]), "memory": 1e9}

    return compute.rows(examined(4, {"compute": measure}, lambda asker: compute.ask_compute(asker, 0.1)), HOSTS)


@pytest.mark.alone
def test_a_straggler_is_named_if_it_stays_one() -> None:
    good = [1e12, 1.1e12, 1e12]
    row, other = judged({0: good, 1: good, 2: good, 3: [3e11, 4e11, 3e11]})
    assert (row.name, row.verdict, row.who) == ("matrix product", WORSE, "rank 3 (b)")
    assert other.verdict == OK
    assert judged({0: good, 1: good, 2: good, 3: [3e11, 1e12]})[0].verdict == OK  # late once
    assert judged({rank: [1e12] for rank in range(4)})[0].verdict == OK  # and measured once


def often_stopped() -> Any:
    """Rank 1 runs for a tenth of the time, by SIGSTOP and SIGCONT, as a process does whose CPU quota is used up."""
    rank = dist.get_rank()
    pids = gather(os.getpid())
    over = threading.Event()

    def stop_and_go() -> None:
        while not over.is_set():
            os.kill(pids[1], signal.SIGSTOP)
            time.sleep(0.09)
            os.kill(pids[1], signal.SIGCONT)
            time.sleep(0.01)

    here = Here(World(rank, 2, rank, 2), torch.device("cpu"), None, 5.0)
    thread = threading.Thread(target=stop_and_go)
    if rank == 0:
        thread.start()
    found = [compute.measure(here, 0.3) for _ in range(compute.AGAIN)]
    gather(None)  # until the slow rank has measured too
    over.set()
    if rank == 0:
        thread.join()
    return {name: max(one[name] for one in found) for name in ("flops", "memory")}


@pytest.mark.alone
@pytest.mark.slow
def test_a_rank_that_is_stopped_again_and_again_is_slow(ranks: Ranks) -> None:
    found = dict(enumerate(ranks.run(often_stopped, ranks=2)))
    assert compute.stragglers(found, "flops") == [1]

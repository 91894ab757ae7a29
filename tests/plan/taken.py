"""What a run has taken, by its own ledger, and what a plan says of it."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from fsdp2.config import parse
from fsdp2_extra.allocations.ledger import Ledger
from fsdp2_extra.allocations.timeline import load
from fsdp2_tools.plan.execute import run
from fsdp2_tools.plan.memory import Memory, memory_of
from tests.harness import main_in_ranks


def run_settled(flags: list[str]) -> None:
    """`fsdp2.train`, each of whose operations waits until gloo's threads have given back what is over. In `Ranks`.

    gloo wakes whoever waits for an exchange and drops the exchange's buffers after that. On a machine with more
    runnable threads than cores it may lose its core in between, for as long as the next layer computes: its ledger
    then has a buffer more than the run needs. A thread that has work to do is running, or waits for a core or for the
    interpreter's lock, which this one lends while it sleeps; one that waits for another rank sleeps.
    """
    original, threads = Ledger.__torch_dispatch__, list[int]()
    listed = -1

    with ExitStack() as opened, pytest.MonkeyPatch.context() as patch:

        def dispatch(ledger: Ledger, *arguments: Any, **more: Any) -> Any:
            nonlocal listed
            if listed != len(ledger.phases):  # a part of the run may have made groups
                opened.close()
                listed, threads[:] = len(ledger.phases), _gloos_threads(opened)
            while any(map(_has_work, threads)):
                time.sleep(1e-4)
            return original(ledger, *arguments, **more)

        patch.setattr(Ledger, "__torch_dispatch__", dispatch)
        main_in_ranks(flags)


def _gloos_threads(opened: ExitStack) -> list[int]:
    """Their /proc/…/stat, open until `opened` is closed: thousands of operations read it."""
    found = []
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended
            if (thread / "comm").read_text().strip() == "pt_gloo_runloop":
                found.append(os.open(thread / "stat", os.O_RDONLY))
                opened.callback(os.close, found[-1])
    return found


def _has_work(stat: int) -> bool:
    with suppress(OSError):  # it has ended
        return os.pread(stat, 64, 0).partition(b") ")[2].startswith(b"R")
    return False


def taken(folder: Path, rank: int) -> int:
    """The most bytes of a run's steps and evaluation."""
    line = load((folder / f"rank{rank}_memory_timeline.json.gz").read_bytes())
    most = total = 0
    for when, change, _ in line.changes():
        total += change
        if line.phase_at(when).name not in ("checkpoint", "full model", "between"):
            most = max(most, total)
    return most


def planned(flags: str, ranks: int = 2, rank: int = 0, *, gpu: bool = False) -> Memory:
    """What flags need as one rank of many, on CPUs or on GPUs."""
    config = parse(flags.split())
    return memory_of(config, rank, run(config, ranks, rank, gloo=not gpu), offload_apart=gpu)

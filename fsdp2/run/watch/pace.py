"""The rank that the others wait for in steps that go on: it computes more of its time than they do."""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from collections.abc import Mapping

import torch.distributed as dist

from fsdp2.options.errors import some
from fsdp2.run.watch.waiting import waits_in

WINDOW = 10.0  # seconds between two judgements
FEWEST = 100  # looks in which a part is known within 0.05
WAITED = 0.25  # of the others' time, for a rank: less is noise, or not worth a node
KEPT = 2  # judgements in a row that must agree


class Pace:
    """The share of its steps that this rank computes; on rank 0, the ranks that compute much more than the others.

    In a step all ranks take the same time, since they wait for each other: a slow one is the one that waits least. Each
    rank looks at its training thread twenty times a second, and says through the process group's store in what part of
    the looks it computed: no collective is added. On a GPU the thread only issues work, so that a rank with slow data
    or a slow CPU is found, and not one whose GPU is slow: `python -m fsdp2.doctor` measures those. Nor is one found
    under DDP, whose backward waits where Python doesn't see it, or where each step waits for the GPU: fp16's scaler and
    `--on-nonfinite skip`.

    Args:
        thread: in which the training runs.
    """

    def __init__(self, rank: int, world_size: int, thread: int) -> None:
        self._rank, self._ranks, self._thread = rank, range(world_size), thread
        self._looks = self._computed = self._windows = 0
        self._since = time.monotonic()
        self._judged = [0] * world_size  # the last window of each rank that was judged
        self._slow: list[tuple[int, ...]] = [()] * KEPT
        self._told: tuple[int, ...] = ()

    def look(self) -> None:
        """See what the training does. Called in a step, by one thread."""
        computes = not waits_in(sys._current_frames()[self._thread])
        self._looks += 1  # at once with the next: the other thread sets both to 0
        self._computed += computes

    def exchange(self, store: dist.Store) -> dict[str, object] | None:
        """Tell the others of this rank's last window, if it is over; on rank 0, a finding about the ranks' if it is
        another one than before. Called by one thread, which may be another than that of `look`."""
        if time.monotonic() - self._since < WINDOW or self._looks < FEWEST:
            return None
        computed = self._computed / self._looks
        self._looks = self._computed = 0
        self._since = time.monotonic()
        self._windows += 1
        store.set(f"pace/{self._rank}", json.dumps([self._windows, computed, socket.gethostname()]))
        keys = [f"pace/{rank}" for rank in self._ranks]
        if self._rank != 0 or not store.check(keys):
            return None
        told = [json.loads(text) for text in store.multi_get(keys)]
        windows = [window for window, _, _ in told]
        if any(window <= before for window, before in zip(windows, self._judged, strict=True)):
            return None  # a rank's window isn't over
        self._judged = windows
        self._slow = [*self._slow[1:], slow({rank: part for rank, (_, part, _) in enumerate(told)})]
        agreed = self._slow[0]
        if any(one != agreed for one in self._slow) or agreed == self._told:
            return None
        self._told = agreed
        usual = statistics.median_low([part for _, part, _ in told])
        names = some([f"rank {rank} ({told[rank][2]})" for rank in agreed])
        theirs = some([f"{told[rank][1]:.0%}" for rank in agreed])
        what = f"the others wait for {names}: of its steps it computes {theirs}, others {usual:.0%}"
        what = what if agreed else "no rank is slower than the others any more"
        return {"about": "pace", "what": what, "ranks": list(agreed)}


def slow(parts: Mapping[int, float]) -> tuple[int, ...]:
    """The ranks that others wait for, by the part of its time, 0 to 1, that each computes. Of two ranks the one that
    waits more is the norm."""
    usual = statistics.median_low(parts.values())
    return tuple(rank for rank, part in sorted(parts.items()) if part - usual >= WAITED)

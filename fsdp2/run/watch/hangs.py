"""A watch beside the training: a run that hangs ends soon, and says which rank the others wait for; one that is
slow because of a rank says so.

Two threads of each rank do it, since the training itself may stand in a collective. One keeps the time and asks nobody.
The other talks through the process group's store, where a call may never return if the store's host has stopped.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from fsdp2.config import Config
from fsdp2.run.directory.rundir import RunDir
from fsdp2.run.process.group import broadcast
from fsdp2.run.process.meeting import LONG
from fsdp2.run.process.runtime import world
from fsdp2.run.watch.pace import Pace
from fsdp2.run.watch.waiting import Standing, collectives_begun, groups_of, last_collective, look, verdict
from fsdp2.units import tell

EXIT_STATUS = 3
FILE = "hang.txt"
# Of a step's limit, if --timeout gives none: seconds, and a multiple of the slowest of the last steps.
LEAST, FACTOR, REMEMBERED = 30.0, 10.0, 16
ANSWER = 5.0  # seconds for every rank to say where it stands
STILL = 2.0  # seconds in which nothing may move after that, before the run ends
TICK, TALK = 0.05, 1.0
STEP = "step"


class Doing(NamedTuple):
    """A rank's place since a moment; a new object each time, so that a thread can tell."""

    phase: str
    step: int
    began: float
    limit: float


class Watch:
    """Ends the process with status 3 if a step, or what is between steps, takes longer than its limit.

    A step's limit is what `--timeout` says, or follows from the last steps; the first step, which compiles and
    connects, an evaluation and a save may take half an hour. All ranks then say where they stand, and one of them
    writes it to hang.txt. While a rank is in a debugger or compiles, nothing ends.

    Args:
        model: whose parameters tell the process groups.
        run: whose folder gets hang.txt.
        on_hang: is called in a thread with the line that names the rank, on the rank that writes it.
    """

    def __init__(self, config: Config, model: nn.Module, run: RunDir, on_hang: Callable[[str], None]) -> None:
        self._timeout, self._folder, self._world, self._on_hang = config.timeout, run.path, world(), on_hang
        self._groups, self._thread = groups_of(model), threading.get_ident()
        self._recent: deque[float] = deque(maxlen=REMEMBERED)
        self._closed, self._overdue = threading.Event(), threading.Event()
        self._forgiven, self._ending = threading.Event(), threading.Event()
        self._round, self._rank = 0, self._world.rank
        self._pace = Pace(self._rank, self._world.world_size, self._thread)
        self._findings: deque[dict[str, object]] = deque()
        self._doing = Doing("start", 0, time.monotonic(), LONG.total_seconds())

    def __enter__(self) -> Watch:
        if self._world.world_size > 1:
            run = os.urandom(8).hex() if self._rank == 0 else ""  # a process group may see several runs
            # A connection of its own: the group's may be busy. torch has its store, which a launcher such as Ray has
            # made, under a private name alone.
            client = dist.distributed_c10d._get_default_store().clone()
            self._store = dist.PrefixStore(f"watch/{broadcast(run)}", client)
            for work in (self._keep_time, self._talk):
                threading.Thread(target=work, name="watch", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._ending.is_set():
            time.sleep(ANSWER)  # a rank that has ended a moment before makes an error here, which isn't the cause
        self._closed.set()

    def begin_step(self, step: int) -> list[dict[str, object]]:
        """Say that this step, counted from 1, begins; what was found of the ranks' pace, on rank 0."""
        self._enter(STEP, step)
        return [self._findings.popleft() for _ in range(len(self._findings))]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say that something else than a step begins, which may take long; so may what follows, until the next step."""
        self._enter(name, self._doing.step)
        yield
        self._enter("between steps", self._doing.step)

    def _enter(self, phase: str, step: int) -> None:
        now, limit = time.monotonic(), LONG.total_seconds()
        if self._doing.phase == STEP:
            self._recent.append(now - self._doing.began)
        if phase == STEP and self._recent:
            limit = self._timeout or min(limit, max(LEAST, FACTOR * max(self._recent)))
        self._doing = Doing(phase, step, now, limit)

    def _keep_time(self) -> None:
        """The first thread. It counts only time in which this process runs, so that one which was stopped and goes on
        isn't taken for one that hangs."""
        doing, seen, last = self._doing, 0.0, time.monotonic()
        while not self._closed.wait(TICK):
            now = time.monotonic()
            seen, last = seen + min(now - last, 1.0), now
            if self._doing.phase == STEP:
                self._pace.look()
            if self._doing is not doing or self._forgiven.is_set():
                doing, seen = self._doing, 0.0
                self._overdue.clear()
                self._forgiven.clear()
            elif seen > doing.limit:
                self._overdue.set()
            if seen > doing.limit + 3 * ANSWER + 2 * self._rank:  # neither a verdict nor a reason to wait on
                standing = self._standing()
                self._write(f"{standing}\n{standing.stack}\n")
                self._end(f"the store doesn't answer: rank 0, or its node, has stopped; {standing}")

    def _talk(self) -> None:
        """The second thread."""
        # The store ends with the process that has it. The training then gets an error of its own, or its time runs out.
        with suppress(dist.DistError):
            while not self._closed.wait(TALK):
                if self._overdue.is_set() or self._store.check([f"{self._round}/alarm"]):
                    self._store.set(f"{self._round}/alarm", "")
                    self._confer()
                if finding := self._pace.exchange(self._store):
                    self._findings.append(finding)

    def _confer(self) -> None:
        """Say where this rank stands, and end as the ranks' judge says: the first rank that can. Or go on."""
        store, began, ranks = self._store, time.monotonic(), range(self._world.world_size)
        prefix = str(self._round)
        store.set(f"{prefix}/{self._rank}", json.dumps(asdict(self._standing())))
        patience = ANSWER + 2 * self._rank
        while not store.check([f"{prefix}/verdict"]):
            everyone = self._rank == 0 and store.check([f"{prefix}/{rank}" for rank in ranks])
            if everyone or time.monotonic() - began > patience:
                if store.add(f"{prefix}/judges", 1) == 1:
                    self._judge(prefix)
                break
            time.sleep(0.1)
        text = store.get(f"{prefix}/verdict").decode()
        if text:
            self._ending.set()
            readers = store.add(f"{prefix}/read", 1)
            while self._rank == 0 and readers < len(ranks) and time.monotonic() - began < 2 * ANSWER:
                time.sleep(0.1)  # others read from a store that may end with this process
                readers = store.add(f"{prefix}/read", 0)
            os._exit(EXIT_STATUS)
        self._round += 1
        self._forgiven.set()

    def _judge(self, prefix: str) -> None:
        store = self._store
        answered = [rank for rank in range(self._world.world_size) if store.check([f"{prefix}/{rank}"])]
        standings = {rank: Standing(**json.loads(store.get(f"{prefix}/{rank}"))) for rank in answered}
        text = verdict(standings, self._world.world_size)
        if text and self._goes_on(standings[self._rank]):
            text = ""
        if text:
            stacks = "\n".join(f"{one}\n{one.stack}" for one in standings.values())
            self._write(f"{text}\n\n{stacks}")
            self._say(text)
        store.set(f"{prefix}/verdict", text)

    def _goes_on(self, stood: Standing) -> bool:
        """True if this rank stands no longer there: what the ranks waited for, a debugger perhaps, has just ended."""
        time.sleep(STILL)
        return (self._doing.step, collectives_begun(self._groups)) != (stood.step, stood.collectives)

    def _standing(self) -> Standing:
        doing = self._doing
        return look(
            self._thread,
            rank=self._rank,
            step=doing.step,
            phase=doing.phase,
            seconds=time.monotonic() - doing.began,
            collectives=collectives_begun(self._groups),
            last=last_collective(self._groups),
        )

    def _write(self, text: str) -> None:
        try:
            with open(self._folder / FILE, "a") as file:  # several ranks may, if the store has stopped
                file.write(text)
        except OSError as error:  # a full disk must not keep the run from ending
            tell(f"{FILE} was not written: {error}\n{text}")

    def _say(self, text: str) -> None:
        tell(f"stopped: {text}; all ranks' stacks: {self._folder / FILE}")
        self._on_hang(text)

    def _end(self, text: str) -> None:
        self._say(text)
        os._exit(EXIT_STATUS)

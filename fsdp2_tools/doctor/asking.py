"""Questions from rank 0 to all ranks, and their answers, through the rendezvous store.

No collective is needed, so a rank that hangs is known by its name: it is the one that doesn't answer in time. What a
question measures runs in a thread of its own, so that a rank whose disk or network hangs still says where it stands.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import PurePath
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.checkpoint.refusal import one_line
from fsdp2.config import Config
from fsdp2.run.process.group import RunStopped
from fsdp2.run.process.runtime import World
from fsdp2_tools.doctor.judging import BAD, WORSE, Hosts, Row

END = "end"
GRACE = 2.0  # seconds that an answer takes beyond what it measures
STARTING = 60.0  # seconds that ranks may start later than rank 0
PATIENCE = 120.0  # seconds in which rank 0, which judges and plans, asks nothing


FIXES = {  # by the kind of trouble
    "silent": "look at that process: it is stopped, swapping or dead, or its host is",
    "hung": "look at what it stands in; --answer-within gives it more time",
    "failed": "mend what it says, and run the doctor again",
}


@dataclass
class Here:
    """A question's view of the rank that it runs on. Each question has a copy, with the same `kept`.

    Attributes:
        seconds: within which it has to answer.
        doing: what it is about to do, for the case that it never ends.
        config: of the training that these ranks are for.
        kept: what one question leaves for a later one.
        left: threads and groups that may never end, each as what says whether it still hangs; with one that does,
            the process has to `leave`.
    """

    world: World
    device: torch.device
    store: Any
    seconds: float
    doing: str = ""
    config: Config = field(default_factory=Config)
    kept: dict[str, Any] = field(default_factory=dict)
    left: list[Callable[[], bool]] = field(default_factory=list)


Question = Callable[..., Any]


@dataclass(frozen=True)
class Trouble:
    """A question that a rank didn't answer: what happened instead, and what it was doing."""

    question: str
    rank: int
    kind: str
    text: str
    doing: str

    @property
    def where(self) -> str:
        return ": ".join(filter(None, (self.doing, self.text)))


def bounded(function: Callable[[Here], Any], here: Here) -> dict[str, Any]:
    """Call a function within a time: its `value`, how it `failed`, or where it has `hung`."""
    box: dict[str, Any] = {}
    mine = dataclasses.replace(here, doing="")  # what hangs here may go on beside a later question

    def work() -> None:
        try:
            if here.device.type == "cuda":
                torch.cuda.set_device(here.device)  # which is a thread's own
            box["value"] = function(mine)
        except Exception as error:
            box["failed"] = one_line(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(here.seconds)
    if thread.is_alive():
        here.left.append(thread.is_alive)
        frame = sys._current_frames().get(thread.ident or 0)
        code = frame.f_code if frame else None
        place = f"{PurePath(code.co_filename).name}, {code.co_name}" if code else "unknown"
        return {"hung": f"stands in {place} after {here.seconds:g} s", "doing": mine.doing}
    return {**box, "doing": mine.doing} if "failed" in box else dict(box)


class Asker:
    """One rank's end of the conversation.

    Args:
        questions: name -> a function of a `Here` and keyword arguments that JSON can hold. It returns such a value.
    """

    def __init__(self, here: Here, questions: Mapping[str, Question]) -> None:
        self.here, self.questions = here, questions
        self.troubles: list[Trouble] = []
        self.left_out: set[int] = set()
        self._number = 0

    @property
    def silent(self) -> set[int]:
        """Ranks that haven't answered once, and are asked no more."""
        return {trouble.rank for trouble in self.troubles if trouble.kind == "silent"}

    @property
    def asked(self) -> list[int]:
        """Ranks whose answers count."""
        others = self.silent | self.left_out
        return [rank for rank in range(self.here.world.world_size) if rank not in others]

    def ask(self, name: str, **arguments: Any) -> dict[int, Any]:
        """By rank, what was answered. Called on rank 0. What wasn't answered is among the troubles."""
        self._number += 1
        self.here.store.set(f"question/{self._number}", json.dumps([name, arguments]))
        patience = self.here.seconds + GRACE + (STARTING if self._number == 1 else 0.0)
        deadline = time.monotonic() + patience
        found = {0: self._measured(name, arguments)}
        for rank in self.asked[1:]:
            text = self._read(f"answer/{self._number}/{rank}", deadline - time.monotonic())
            found[rank] = {"silent": f"no answer in {patience:g} s"} if text is None else json.loads(text)
        for rank, answer in found.items():
            for kind in FIXES:
                if kind in answer:
                    self.troubles.append(Trouble(name, rank, kind, answer[kind], answer.get("doing", "")))
        return {rank: answer["value"] for rank, answer in found.items() if "value" in answer}

    def end(self, result: Any) -> None:
        """Send the others home with a result, and wait until they have read it. Called on rank 0."""
        self._number += 1
        self.here.store.set(f"question/{self._number}", json.dumps([END, result]))
        deadline = time.monotonic() + self.here.seconds
        for rank in range(1, self.here.world.world_size):
            if rank not in self.silent:  # rank 0 may hold the store
                self._read(f"answer/{self._number}/{rank}", deadline - time.monotonic())

    def serve(self) -> Any:
        """Answer until rank 0 has no more questions; its result. Raises RunStopped if rank 0 itself is silent."""
        while True:
            self._number += 1
            text = self._read(f"question/{self._number}", 4 * self.here.seconds + PATIENCE)
            if text is None:
                mine = self.here.world.rank
                raise RunStopped(f"rank {mine}: rank 0 is silent: it has ended, or is stopped; look at that process")
            name, arguments = json.loads(text)
            answer = {} if name == END else self._measured(name, arguments)
            self.here.store.set(f"answer/{self._number}/{self.here.world.rank}", json.dumps(answer))
            if name == END:
                return arguments

    def _measured(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return bounded(lambda mine: self.questions[name](mine, **arguments), self.here)

    def _read(self, key: str, seconds: float) -> str | None:
        store = self.here.store
        try:
            if seconds > 0:
                store.wait([key], timedelta(seconds=seconds))
            elif not store.check([key]):
                return None
            text: str = store.get(key).decode()
            return text
        except dist.DistError:  # the time is over, or the process with the store has gone
            return None

    def rows(self, hosts: Hosts, judged: Sequence[str] = (), harmless: Collection[tuple[str, str]] = ()) -> list[Row]:
        """One for each kind of trouble with each question. What keeps a rank from answering keeps it from training.

        Args:
            judged: questions whose hung and failed ranks have a row elsewhere.
            harmless: question and kind of trouble of what a training can do without.
        """
        found: dict[tuple[str, str], list[Trouble]] = {}
        for one in self.troubles:
            if one.kind == "silent" or one.question not in judged:
                found.setdefault((one.question, one.kind), []).append(one)
        result = []
        for (question, kind), troubles in found.items():
            row = Row(f"answer: {question}", troubles[0].where, f"an answer in {self.here.seconds:g} s")
            verdict = WORSE if (question, kind) in harmless else BAD
            result.append(row.judged([one.rank for one in troubles], hosts, verdict, FIXES[kind]))
        return result

"""Runs through Ray, as tests start them and look at what they leave."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

from launchers import ray_train
from tests.harness import small
from tests.test_resume import metrics_of


def losses_in(run: Path) -> list[float]:
    return [record["loss"] for record in metrics_of(run) if record["kind"] == "train"]


def through_ray(run: Path | str, *flags: str, workers: int = 2, steps: int = 6) -> Any:
    """Ray's Result of a run, after which Ctrl-C is the caller's again."""
    interrupted = signal.getsignal(signal.SIGINT)
    try:
        return ray_train.main([*small(run, f"--max-steps={steps}", *flags), f"--num-workers={workers}"])
    finally:
        assert signal.getsignal(signal.SIGINT) is interrupted


def processes(pattern: bytes) -> list[int]:
    """Ids of the processes whose command line holds a pattern, in the order in which they were started."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                line = (process / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if re.search(pattern, line):
                found.append(int(process.name))
    return sorted(found)


def workers_of_ray() -> list[int]:
    return processes(rb"^ray::\S*TrainWorker")


def kill_at(run: Path, step: int, which: int, number: int = signal.SIGKILL) -> threading.Thread:
    """Send one of Ray's workers, in the order of their processes, a signal as soon as a run has done a step."""

    def watch() -> None:
        ended = threading.Event()
        while not ended.wait(0.01):
            metrics = run / "metrics.jsonl"
            if metrics.is_file() and f'"step":{step},' in metrics.read_text().replace(" ", ""):
                os.kill(workers_of_ray()[which], number)
                ended.set()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread

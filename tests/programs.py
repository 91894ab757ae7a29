"""Python programs that tests start without importing torch again: in this process, on the pool's ranks, or forked."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import socket
import sys
import threading
import time
import warnings
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp2.run.process import ending
from tests.harness import PROCESSES


def program(
    target: str, arguments: list[str], folder: str, environment: dict[str, str], by_hand: bool
) -> tuple[int, str]:
    """Run a module (`-m name`) or a script in this process; its exit status and what it printed."""
    printed, status = io.StringIO(), 0
    before, path = list(sys.argv), list(sys.path)
    changed = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    sys.argv = [target, *arguments]
    if by_hand:
        threading.Thread(target=_stop_after_a_step, args=(Path(folder),), daemon=True).start()
    try:
        with (
            chdir(folder),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            warnings.catch_warnings(),
        ):
            # Of no program that a user starts: its module is imported already, and stderr is no file.
            warnings.filterwarnings("ignore", "'.*' found in sys.modules after import of package")
            warnings.filterwarnings("ignore", "Unable to enable fault handler")
            if target.startswith("-m "):
                runpy.run_module(target[3:], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(target, run_name="__main__")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            printed.write(ended.code)
    finally:
        sys.argv, sys.path[:] = before, path
        for name, value in changed.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    return status, printed.getvalue()


def _stop_after_a_step(folder: Path) -> None:
    def steps() -> int:
        return sum(file.read_text().count('"kind": "train"') for file in folder.glob("runs/*/metrics.jsonl"))

    before, deadline = steps(), time.monotonic() + 60
    while steps() <= before and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)


def on_a_rank(*what: Any) -> tuple[int, str]:
    """`program` as one rank. A refusal waits for nobody: torchrun would end it once rank 0 has spoken."""
    with mock.patch.object(ending, "_ended_by_launcher", return_value=True):
        return program(*what)


def _alone(pipe: Any, *what: Any) -> None:
    pipe.send(on_a_rank(*what))
    pipe.close()


def started(*what: Any) -> tuple[Any, Any]:
    """`program` in a process of its own, forked from one that has torch imported."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_alone, args=(theirs, *what))
    process.start()
    theirs.close()
    return process, ours


def result(process: Any, pipe: Any) -> tuple[int, str]:
    """Of what was `started`: its exit status and what it printed."""
    try:
        return pipe.recv() if pipe.poll(240) else (1, "no end in four minutes")
    except EOFError:
        return 1, "it ended without a result"
    finally:
        process.join(20)
        process.kill()


def in_a_process(target: str, arguments: list[str], folder: Path, **environment: str) -> tuple[int, str]:
    return result(*started(target, arguments, str(folder), environment, False))


def on_ranks_of_its_own(
    number: int, target: str, arguments: list[str], folder: Path, environment: dict[str, str]
) -> tuple[int, str]:
    """A program that makes its process group by itself, in as many processes as torchrun would start."""
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {**environment, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    shared |= {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
    processes = [started(target, arguments, str(folder), {**shared, **place}, False) for place in places]
    results = [result(*one) for one in processes]
    return max(status for status, _ in results), "".join(text for _, text in results)

"""Start a program's ranks, wait for them, and read what they recorded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp2.run.process.ending import lost_peer
from migration.prove.rank import SPAWNS
from migration.prove.record import Record

GRACE = 20.0  # seconds for the other ranks when one has ended
START = "from migration.prove.rank import main; main()"  # by import, so that it can be pickled for spawned ranks
SHOWN = 12  # lines of a failed rank


class Failed(RuntimeError):
    """A program couldn't be recorded. The message says which, and why; `printed` is the end of what it printed."""

    def __init__(self, message: str, printed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.printed = printed


@dataclass
class Program:
    """A script with its arguments, to be run on some ranks."""

    script: Path
    arguments: list[str]
    ranks: int
    timeout: float  # seconds
    stand_in: int = 0  # GPUs that each node seems to have, with the CPU in their place
    bare: bool = False  # one process without torchrun's variables, which starts its ranks by itself

    def record(self, folder: Path, **settings: Any) -> Record:
        """Run it in a new folder. Raises Failed. `settings`: see `rank.run`."""
        folder.mkdir()
        print(f"prove: runs {self.script} on {self.ranks} rank{'s' * (self.ranks > 1)}", file=sys.stderr, flush=True)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        command = [sys.executable, "-c", START, json.dumps(self.settings(folder, settings))]
        processes = []
        try:
            for rank in range(1 if self.bare else self.ranks):
                with open(folder / f"out-{rank}", "wb") as out, open(folder / f"err-{rank}", "wb") as err:
                    processes.append(
                        subprocess.Popen(
                            [*command, str(self.script), *self.arguments],
                            env={**os.environ, **self._environment(rank, store.port)},
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=err,
                            start_new_session=True,
                        )
                    )
            self._wait(folder, processes)
        finally:
            for process in processes:
                _end(process)
        return self._read(folder)

    def settings(self, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings that `rank.run` takes."""
        return {"folder": str(folder), **settings} | {"stand_in": self.stand_in}

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """Set torchrun's variables. The store is this process's, as under torchrun: no port can be taken meanwhile."""
        node, local = divmod(rank, here := self.stand_in or self.ranks)
        own = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": here}
        torchrun = {
            "GROUP_RANK": node,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": 1}  # sums don't depend on how many cores there are
        return {name: str(value) for name, value in (variables | ({} if self.bare else own | torchrun)).items()}

    def _wait(self, folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + self.timeout
        while running := [number for number, process in enumerate(processes) if process.poll() is None]:
            failed = [number for number, process in enumerate(processes) if process.poll()]
            over = len(running) < len(processes) and not (folder / SPAWNS).exists()
            if failed or over:
                deadline = min(deadline, time.monotonic() + (2.0 if failed else GRACE))
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if any(process.poll() for process in processes):
            raise self._failed(folder, processes)
        if running:
            who = ", ".join(map(str, running))
            ended = "the others have ended" if len(running) < len(processes) else f"{self.timeout:.0f} s have passed"
            raise Failed(f"{self.script}: {ended}, and rank {who} still runs; it waits, or --timeout is too short")

    def _failed(self, folder: Path, processes: list[subprocess.Popen[bytes]]) -> Failed:
        ends = []
        for rank, process in enumerate(processes):
            if code := process.poll():
                lines = _end_of(folder / f"err-{rank}")
                how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
                ends.append((any(map(lost_peer, lines[-3:])), rank, how, lines))  # who fails because another did, last
        _, rank, how, lines = min(ends)
        last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
        if re.search("NVIDIA|CUDA|GPU|nccl|accelerator", last) and not self.stand_in:
            last += "; --stand-in runs it with the CPU in a GPU's place"
        return Failed(f"{self.script} on {self.ranks} ranks: rank {rank}: {how}: {last}", lines)

    def _read(self, folder: Path) -> Record:
        found = {}
        for file in folder.glob("rank-*.jsonl"):
            events = [json.loads(line) for line in file.read_text().splitlines()]
            if facts := next((event for event in events if event["kind"] == "facts"), None):
                found[facts["rank"]] = events
        if sorted(found) != list(range(max(self.ranks if not (folder / SPAWNS).exists() else 1, len(found)))):
            seen = ", ".join(map(str, sorted(found))) or "none"
            raise Failed(
                f"{self.script}: steps of a torch.optim optimizer were recorded on these ranks only: {seen}; "
                "a program that only evaluates, or steps by other means, can't be compared",
                _end_of(folder / "out-0"),
            )
        return Record([found[rank] for rank in sorted(found)])


def _end_of(output: Path) -> list[str]:
    return output.read_text(errors="replace").strip().splitlines()[-SHOWN:] if output.exists() else []


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it started, which is in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()

"""Two torchruns on one machine that act as two nodes of an elastic run."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.test_launch import Started, finish, start

# As in docs/elastic.md: a lost node is dropped after 3 s and not 15, and others are waited for 2 s and not 30.
SOON = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"
# What gives a torchrun, and all that it starts, a memory that other nodes don't see. It needs root.
OWN_MEMORY = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
# Without it a node that comes back waits for an address that rank 0 doesn't give a second time (docs/elastic.md).
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Nodes:
    """Torchruns by the number of their node. Leaving this kills all of them.

    Args:
        server: the node that serves the rendezvous; None if somebody else does, at `port`.
        nnodes: as of torchrun, such as 1:2.
        configuration: torchrun's `--rdzv-conf`.
        around: what runs torchrun, such as a program that gives it a memory of its own.
    """

    def __init__(
        self,
        folder: Path,
        nnodes: str = "1:2",
        per_node: int = 1,
        around: Sequence[str] = (),
        configuration: str = SOON,
        server: int | None = 0,
    ) -> None:
        self.folder, self.nnodes, self.per_node, self.around = folder, nnodes, per_node, around
        self.configuration, self.server = configuration, server
        self.running: dict[int, Started] = {}
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]

    def start(self, node: int, flags: Sequence[str]) -> None:
        """Start the torchrun of a node."""
        command = [
            *self.around,
            *("torchrun", f"--nnodes={self.nnodes}", f"--nproc_per_node={self.per_node}", "--max-restarts=3"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=elastic"),
            f"--rdzv-conf={self.configuration}{self.configuration and ','}is_host={int(node == self.server)}",
            *("-m", "fsdp2.train", *flags),
        ]
        self.running[node] = start(
            ["sh", "-c", f'exec "$@" >>node{node}.log 2>&1', "sh", *command], self.folder, **ENVIRONMENT
        )

    def lose(self, node: int) -> float:
        """Kill a node's torchrun and ranks at once; when, by `time.time`."""
        process, at = self.running.pop(node), time.time()
        for pid in process.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        finish(process)
        return at

    def stop(self) -> None:
        """Ctrl-C to all, after which the run saves; and wait for their end."""
        for process in self.running.values():
            process.send_signal(signal.SIGINT)
        for process in self.running.values():
            finish(process)
        self.running = {}

    def output(self) -> str:
        """What each node has printed."""
        return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in sorted(self.folder.glob("node*.log")))

    def __enter__(self) -> Nodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in list(self.running):
            self.lose(node)

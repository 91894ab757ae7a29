"""Two nodes on one machine, each with a network of its own: addresses, host names and interfaces.

They are network namespaces, joined by a cable. It needs root and Linux's `ip`.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import pytest

from tests.test_launch import Started, finish, start

_count = itertools.count()


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, timeout=30)


class Nodes:
    """The nodes n0 and n1, at 10.77.0.1 and .2 (fd77::1 and ::2) on the interface `cable`. Leaving this ends all.

    Args:
        folder: where commands are started; both nodes see it.
        hosts: name -> address, all that the nodes can resolve; unset, their own two names.
        second_interface: each node also has an interface `aside`, which stands first and leads nowhere,
            since its addresses are in two networks.
        own: a folder of which each node has its own.
    """

    def __init__(
        self,
        folder: Path,
        hosts: dict[str, str] | None = None,
        *,
        second_interface: bool = False,
        own: Path | None = None,
    ) -> None:
        if os.geteuid() != 0 or subprocess.run(["ip", "netns", "list"], capture_output=True).returncode != 0:
            pytest.skip("needs root, and network namespaces (ip netns)")
        self.folder, self._own = folder, own
        self._spaces = [f"fsdp2-test-{os.getpid()}-{next(_count)}" for _ in range(2)]
        self._started: list[Started] = []
        names = {"n0": "10.77.0.1", "n1": "10.77.0.2"} if hosts is None else hosts
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        try:
            for space in self._spaces:
                _ip(f"netns add {space}")
            if second_interface:
                _ip(f"link add aside netns {self._spaces[0]} type veth peer name aside netns {self._spaces[1]}")
                for node, space in enumerate(self._spaces):
                    _ip(f"-n {space} addr add 192.168.{node}.1/24 dev aside")
                    _ip(f"-n {space} link set aside up")
            _ip(f"link add cable netns {self._spaces[0]} type veth peer name cable netns {self._spaces[1]}")
            for node, space in enumerate(self._spaces, 1):
                _ip(f"-n {space} addr add 10.77.0.{node}/24 dev cable")
                _ip(f"-n {space} addr add fd77::{node}/64 dev cable nodad")
                _ip(f"-n {space} link set lo up")
                _ip(f"-n {space} link set cable up")
        except BaseException:
            self._remove()
            raise

    def start(self, node: int, command: Sequence[str | Path], environment: Mapping[str, str]) -> Started:
        """Start a command on a node."""
        # No name server: a query would wait for one that can't be reached.
        prepare = f"hostname n{node} && mount --bind hosts /etc/hosts && mount --bind /dev/null /etc/resolv.conf"
        if self._own is not None:
            prepare += f" && mount -t tmpfs tmpfs {self._own}"
        around = ["ip", "netns", "exec", self._spaces[node], "unshare", "-m", "-u", "sh", "-c"]
        process = start([*around, f'{prepare} && exec "$@"', "sh", *command], self.folder, **environment)
        self._started.append(process)
        return process

    def finish(self, timeout: float = 120) -> list[tuple[int, str, str]]:
        """Status, stdout and stderr of each command, in the order of their start."""
        results = [finish(process, timeout) for process in self._started]
        self._started = []
        return results

    def _remove(self) -> None:
        for space in self._spaces:
            with suppress(subprocess.CalledProcessError):  # it was never made
                _ip(f"netns del {space}")

    def __enter__(self) -> Nodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._started:
            process.kill()
            finish(process)
        self._remove()

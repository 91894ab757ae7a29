"""Hosts on one machine, each with a network, a name and mounts of its own, whose packets pass a switch in this process.

The switch delays and loses packets as a bad path does; it stands in for `tc netem`, which many kernels lack. It needs
root, network namespaces and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pytest

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x1, 0x1000  # of linux/if_tun.h
_TCP, _SYN, _ACK = 6, 0x02, 0x10
_count = itertools.count()

Pair = tuple[int, int]


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, timeout=30)


@dataclass(frozen=True)
class Faults:
    """What is wrong with the network, by pair of hosts, the lower number first.

    Attributes:
        delay: seconds that a packet takes one way.
        loss: the part of packets that are lost.
        closed: hosts behind a firewall that drops what begins a connection to them.
        rate: bytes/s that each host can send; None for what this process can forward.
    """

    delay: Mapping[Pair, float]
    loss: Mapping[Pair, float]
    closed: frozenset[int] = frozenset()
    rate: float | None = None


class Switch:
    """The hosts h0, h1, … at 10.78.0.1, .2, … Leaving this removes them; their processes must have ended."""

    def __init__(self, folder: Path, count: int, faults: Faults) -> None:
        if os.geteuid() != 0 or not os.path.exists("/dev/net/tun"):
            pytest.skip("needs root and /dev/net/tun")
        if subprocess.run(["ip", "netns", "list"], capture_output=True).returncode != 0:
            pytest.skip("needs network namespaces (ip netns)")
        self.faults, self.folder = faults, folder
        self._random = random.Random(1)
        self._over = threading.Event()
        self._spaces = [f"fsdp2-doctor-{os.getpid()}-{next(_count)}" for _ in range(count)]
        self._links: list[int] = []
        lines = ["127.0.0.1 localhost", *(f"10.78.0.{host + 1} h{host}" for host in range(count))]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        self._thread = threading.Thread(target=self._forward)
        try:
            for host in range(count):
                self._plug(host)
        except BaseException:
            self._remove()
            raise

    def _plug(self, host: int) -> None:
        space, name = self._spaces[host], f"t{os.getpid()}h{host}"
        _ip(f"netns add {space}")
        self._links.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        fcntl.ioctl(self._links[-1], _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
        _ip(f"link set {name} netns {space}")
        _ip(f"-n {space} link set {name} txqueuelen 10000")
        _ip(f"-n {space} addr add 10.78.0.{host + 1}/24 dev {name}")
        _ip(f"-n {space} link set {name} up")
        _ip(f"-n {space} link set lo up")

    def around(self, host: int, before: str = "true") -> list[str]:
        """What goes before a command that runs on a host; a shell's line may prepare it, with mounts of its own."""
        prepare = f"hostname h{host} && mount --bind {self.folder}/hosts /etc/hosts && {before}"
        words = ["ip", "netns", "exec", self._spaces[host], "unshare", "-m", "-u"]
        return [*words, "sh", "-c", f'{prepare} && exec "$@"', "sh"]

    def _forward(self) -> None:
        """Each packet goes to whom it is for: at once, after its pair's delay, or not at all."""
        late: list[tuple[float, int, int, bytes]] = []  # when, in which order, to whom, what
        order = itertools.count()
        sent = [0.0] * len(self._links)  # when a host's last packet has left it
        while not self._over.is_set():
            wait = 0.1 if not late else max(0.0, min(0.1, late[0][0] - time.monotonic()))
            ready, _, _ = select.select(self._links, [], [], wait)
            for link in ready:
                packet = os.read(link, 1 << 16)
                ends = self._links.index(link), packet[19] - 1
                if packet[0] >> 4 != 4 or not 0 <= ends[1] < len(self._links):
                    continue  # IPv6's own questions, and multicast
                pair = min(ends), max(ends)
                if self._random.random() < self.faults.loss.get(pair, 0.0) or self._refused(packet, ends[1]):
                    continue
                left = time.monotonic()
                if self.faults.rate is not None:
                    left = sent[ends[0]] = max(left, sent[ends[0]]) + len(packet) / self.faults.rate
                heapq.heappush(late, (left + self.faults.delay.get(pair, 0.0), next(order), ends[1], packet))
            while late and late[0][0] <= time.monotonic():
                _, _, host, packet = heapq.heappop(late)
                os.write(self._links[host], packet)

    def _refused(self, packet: bytes, host: int) -> bool:
        head = 4 * (packet[0] & 0xF)
        flags = packet[head + 13] if packet[9] == _TCP else 0
        return host in self.faults.closed and flags & (_SYN | _ACK) == _SYN

    def __enter__(self) -> Switch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._remove()

    def _remove(self) -> None:
        for link in self._links:
            os.close(link)
        for space in self._spaces:
            with suppress(subprocess.CalledProcessError):  # it was never made
                _ip(f"netns del {space}")

"""The network between ranks, two by two: plain TCP, as gloo and nccl's bootstrap use it. A slow or dead pair is named.

Few ranks are measured in every pair. Many play a tournament: in round r rank i meets rank i ^ 2**r, so that each rank
meets about log2 of them, near and far ones. All pairs of a round run at once and share the links between hosts, as a
collective's ranks do; a pair that seems slow is measured again, alone.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

from fsdp2_tools.doctor.asking import Asker, Here
from fsdp2_tools.doctor.judging import BAD, WORSE, Hosts, Row, beside_median, far_above

FEW = 8  # ranks of which every pair is measured, in at most 7 rounds
PINGS = 30
TIMES_SLOWER = 3.0  # than the median pair of its kind, within a host or between hosts
# What a busy core adds to a round trip, and to a transfer. Smaller differences aren't the network's.
NOISE = 0.002
SLOWEST = 0.01  # seconds of a round trip: no network of one building takes so long
LOSS = 0.001  # part of the segments that may be sent again; TCP halves its rate at each loss
MOST_NAMED = 8  # causes in a row of the report
FEW_LOST = 5  # segments, which say nothing about a part
AGAIN = 3  # times a question's time, within which slow pairs are measured again
_HELLO = struct.Struct("!II")  # the caller's rank, and which measurement it calls for
_SIOCGIFADDR = 0x8915  # Linux's netdevice(7)
_TCP_INFO_RETRANSMITTED, _TCP_INFO_SENT = 100, 136  # offsets in Linux's struct tcp_info

FIXES = {
    "round trip": "look at the path between them: a switch, a VPN, or a wrong interface",
    "bandwidth": "look at the port's speed and errors: ethtool, ibstat",
    "loss": "look for a bad cable or a full queue: ip -s link",
}

Pair = tuple[int, int]
INSIDE, BETWEEN = "within hosts", "between hosts"


def hello(here: Here) -> list[str]:
    """This rank's host and the address at which it listens for the others from now on."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    here.doing = f"looking for the interface {named} of GLOO_SOCKET_IFNAME" if named else "looking for its own address"
    address = own_address(here.world.local_world_size == here.world.world_size, named)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=64)
    listener.settimeout(here.seconds / 2)
    here.kept |= {"listener": listener, "waiting": {}}
    here.store.set(f"address/{here.world.rank}", f"{address} {listener.getsockname()[1]}")
    return [socket.gethostname(), address]


def own_address(alone: bool, interface: str = "") -> str:
    """The interface's address, else that from which this host reaches the master's, or any host if that is a loopback.

    Args:
        alone: all ranks are on this host, so a loopback serves.
        interface: that gloo was told to use. Raises OSError if there is no such one.
    """
    if interface and (found := _address_of(interface)):
        return found
    master = os.environ.get("MASTER_ADDR", "localhost")
    for target in (master, "192.0.2.1", "2001:db8::1"):  # the latter two are nobody's; nothing is sent
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                address = str(probe.getsockname()[0])
        except OSError:  # no route, or no such name
            continue
        if alone or not address.startswith(("127.", "::1")):
            return address
    return "127.0.0.1"


def _address_of(interface: str) -> str | None:
    """Its IPv4 address; None if it has none, or the system isn't Linux. Raises OSError if there is no such one."""
    socket.if_nametoindex(interface)
    if sys.platform != "linux":
        return None
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError:  # it has IPv6 alone
            return None


def schedule(ranks: int) -> list[list[Pair]]:
    """The pairs of each round, in which no rank is twice."""
    bits = (ranks - 1).bit_length()
    steps = range(1, 1 << bits) if ranks <= FEW else [1 << number for number in range(bits)]
    return [[(rank, rank ^ step) for rank in range(ranks) if rank < rank ^ step < ranks] for step in steps]


def meet(here: Here, pairs: Sequence[Sequence[int]], size: int, number: int) -> Any:
    """Measure the pair that this rank is in, if any: seconds of a round trip and bytes/s of this rank's sending.

    Args:
        pairs: that meet now.
        size: bytes to send each way.
        number: of this measurement; a call for an earlier one, which nobody took in time, is dropped.
    """
    rank = here.world.rank
    other = next((a if b == rank else b for a, b in pairs if rank in (a, b)), None)
    if other is None:
        return None
    here.doing = f"meeting rank {other}"
    try:
        # Both ways, as a group's ranks call each other; one port may be blocked. The first connection is measured.
        first = rank < other
        with _connected(here, other, number, calls=first) as link, _connected(here, other, number, calls=not first):
            link.settimeout(here.seconds / 2)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return {"other": other, **_measured(link, first=first, size=size)}
    except OSError as error:
        return {"other": other, "error": str(error) or type(error).__name__}


def _connected(here: Here, other: int, number: int, *, calls: bool) -> socket.socket:
    """A connection with another rank: this one calls, or listens."""
    if calls:
        here.store.wait([f"address/{other}"], timedelta(seconds=here.seconds / 2))
        address, port = here.store.get(f"address/{other}").decode().split()
        link = socket.create_connection((address, int(port)), timeout=here.seconds / 2)
        link.sendall(_HELLO.pack(here.world.rank, number))
        return link
    waiting: dict[tuple[int, ...], socket.socket] = here.kept["waiting"]
    deadline = time.monotonic() + here.seconds / 2
    while (other, number) not in waiting:
        if time.monotonic() > deadline:
            raise TimeoutError("it didn't call")
        link, _ = here.kept["listener"].accept()
        link.settimeout(here.seconds / 2)
        waiting[_HELLO.unpack(_received(link, _HELLO.size))] = link
    return waiting.pop((other, number))


def _measured(link: socket.socket, *, first: bool, size: int) -> dict[str, Any]:
    trips = []
    for _ in range(PINGS):
        if first:
            before = time.perf_counter()
            link.sendall(b"p")
            _received(link, 1)
            trips.append(time.perf_counter() - before)
        else:
            _received(link, 1)
            link.sendall(b"p")
    best = 0.0
    for sender in (first, not first) * 3:
        if sender:
            before = time.perf_counter()
            link.sendall(bytes(size))
            _received(link, 1)
            best = max(best, size / (time.perf_counter() - before))
        else:
            _received(link, size)
            link.sendall(b"a")
    facts = {"rate": best, **_segments(link)}
    return {**facts, "trip": min(trips)} if first else facts  # the best is what the link can do, however busy the cores


def _received(link: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        got = link.recv_into(view)
        if got == 0:
            raise ConnectionError("the other side has closed the connection")
        view = view[got:]
    return bytes(buffer)


def _segments(link: socket.socket) -> dict[str, int]:
    """The segments that this side had to send again, and all that it sent; Linux alone tells."""
    option = getattr(socket, "TCP_INFO", None)
    info = link.getsockopt(socket.IPPROTO_TCP, option, 256) if option else b""
    if len(info) < _TCP_INFO_SENT + 4:
        return {"again": 0, "sent": 0}
    (again,), (sent,) = (struct.unpack_from("=I", info, at) for at in (_TCP_INFO_RETRANSMITTED, _TCP_INFO_SENT))
    return {"again": again, "sent": sent}


def ask_pairs(asker: Asker, hosts: Hosts, size: int) -> dict[Pair, dict[str, Any]]:
    """All pairs, by rank, as measured; those that seem slow are measured again, and the better result counts."""
    found: dict[Pair, dict[str, Any]] = {}
    numbers = count()

    def ask(pairs: list[Pair]) -> None:
        _collect(found, asker.ask("meet", pairs=pairs, size=size, number=next(numbers)), hosts)

    for pairs in schedule(asker.here.world.world_size):
        there = {*asker.asked}
        ask([pair for pair in pairs if {*pair} <= there])
    until = time.monotonic() + AGAIN * asker.here.seconds
    for _ in range(2):
        # One at a time: a rank that has been late for its pair makes the next one late, and so does a crowded link.
        for pair in slow_pairs(found, hosts, size):
            if time.monotonic() < until:
                ask([pair])
    return found


def _collect(found: dict[Pair, dict[str, Any]], answers: Mapping[int, Any], hosts: Hosts) -> None:
    """Both ends' results as one for their pair; of several measurements the better one.

    `link` is the bytes/s of the link that the pair has used. A host's link to others carries all of its pairs at once,
    so it is as fast as these together.
    """
    merged: dict[Pair, list[dict[str, Any]]] = {}
    for rank, one in answers.items():
        if one is not None:
            merged.setdefault((min(rank, one["other"]), max(rank, one["other"])), []).append(one)
    far = [pair for pair in merged if hosts.of[pair[0]] != hosts.of[pair[1]]]
    sharing = Counter(hosts.of[rank] for pair in far for rank in pair)
    for pair, ends in merged.items():
        errors = [one["error"] for one in ends if "error" in one]
        if errors or len(ends) < 2:
            found.setdefault(pair, {}).setdefault("error", (errors or ["one of them doesn't answer"])[0])
            continue
        rate = min(one["rate"] for one in ends)
        new = {
            "trip": min(one["trip"] for one in ends if "trip" in one),
            "rate": rate,
            "link": rate * (max(sharing[hosts.of[rank]] for rank in pair) if pair in far else 1),
            "lost": max(one["again"] / max(1, one["sent"]) for one in ends),
            "again": max(one["again"] for one in ends),
        }
        before = found.get(pair, {})
        better = {"rate": max, "link": max}
        found[pair] = {key: better.get(key, min)(value, before.get(key, value)) for key, value in new.items()}


def kinds(found: Mapping[Pair, Mapping[str, Any]], hosts: Hosts) -> list[tuple[str, dict[Pair, Mapping[str, Any]]]]:
    """The pairs that have been measured, within hosts and between hosts apart."""
    good = {pair: one for pair, one in found.items() if "error" not in one}
    inside = {pair: one for pair, one in good.items() if hosts.of[pair[0]] == hosts.of[pair[1]]}
    between = {pair: one for pair, one in good.items() if pair not in inside}
    return [(name, part) for name, part in ((INSIDE, inside), (BETWEEN, between)) if part]


def _findings(kind: str, pairs: Mapping[Pair, Mapping[str, Any]], size: int) -> dict[str, list[Pair]]:
    """The pairs of one kind that are slow, by what is slow. A loopback loses segments only where a reader is slow."""
    trips = {pair: one["trip"] for pair, one in pairs.items()}
    times = {pair: size / one["rate"] for pair, one in pairs.items()}
    late = set(far_above(trips, TIMES_SLOWER, NOISE)) | {pair for pair, trip in trips.items() if trip > SLOWEST}
    lossy = [pair for pair, one in pairs.items() if one["lost"] > LOSS and one["again"] > FEW_LOST]
    return {
        "round trip": sorted(late),
        "bandwidth": far_above(times, TIMES_SLOWER, 5 * NOISE),
        "loss": lossy if kind == BETWEEN else [],
    }


def slow_pairs(found: Mapping[Pair, Mapping[str, Any]], hosts: Hosts, size: int) -> list[Pair]:
    """Those that are worth a second look, dead ones included."""
    dead = [pair for pair, one in found.items() if "error" in one]
    late = [
        pair for kind, part in kinds(found, hosts) for some in _findings(kind, part, size).values() for pair in some
    ]
    return list(dict.fromkeys([*dead, *late]))


def blame(guilty: Collection[Pair], every: Collection[Pair], hosts: Hosts) -> str:
    """The explanation of bad pairs: a host, two hosts or a rank all of whose pairs are bad, else the pairs.

    A host is judged by its pairs with other hosts alone. With one other host they don't say which of the two it is.
    """
    between: defaultdict[frozenset[str], set[Pair]] = defaultdict(set)
    by_rank: defaultdict[int, set[Pair]] = defaultdict(set)
    for pair in every:
        between[frozenset(hosts.of[rank] for rank in pair)].add(pair)
        for rank in pair:
            by_rank[rank].add(pair)
    names = list(dict.fromkeys(hosts.of[rank] for pair in sorted(guilty) for rank in pair))
    causes: list[tuple[str, set[Pair]]] = []
    for host in names:
        others = [its for two, its in between.items() if host in two and len(two) > 1]
        if len(others) > 1:
            causes.append((hosts.named(hosts.ranks(host)), set().union(*others)))
    for two, its in between.items():
        if len(two) > 1 and two <= {*names}:
            causes.append(("hosts {} and {}".format(*sorted(two, key=names.index)), its))
    causes += [(hosts.named([rank]), by_rank[rank]) for rank in sorted({rank for pair in guilty for rank in pair})]
    bad, left, named = set(guilty), set(guilty), list[str]()
    for who, its in causes:
        if its <= bad and len(its & left) > 1:
            named.append(who)
            left -= its
    ends: dict[tuple[str, str], list[Pair]] = {}
    for pair in sorted(left):
        ends.setdefault((hosts.of[pair[0]], hosts.of[pair[1]]), []).append(pair)
    for (a, b), pairs in ends.items():
        whole = a != b and len(between[frozenset((a, b))]) == 1
        shown = ", ".join(f"ranks {x} and {y} ({a}, {b})" for x, y in pairs[:4])
        named.append(f"hosts {a} and {b}" if whole else shown)
    return "; ".join(named[:MOST_NAMED] + [f"{len(named) - MOST_NAMED} more"] * (len(named) > MOST_NAMED))


def rows(found: Mapping[Pair, Mapping[str, Any]], hosts: Hosts, size: int) -> list[Row]:
    """Judge all pairs."""
    dead = [pair for pair, one in found.items() if "error" in one]
    result = []
    if dead:
        text = f"{len(dead)} of {len(found)} pairs: {found[dead[0]]['error']}"
        fix = "open all TCP ports between the hosts; or name their interface in GLOO_SOCKET_IFNAME"
        result.append(Row("connection", text, "each rank reaches each", BAD, blame(dead, found, hosts), fix))
    for kind, pairs in kinds(found, hosts):
        slow = _findings(kind, pairs, size)
        trips, rates = [one["trip"] * 1e3 for one in pairs.values()], [one["rate"] / 1e9 for one in pairs.values()]
        judged = {
            "round trip": beside_median(f"round trip {kind}", trips, max, "{:.3g} ms".format, "pair"),
            "bandwidth": beside_median(f"bandwidth {kind}", rates, min, "{:.3g} GB/s".format, "pair"),
        }
        if kind == BETWEEN:
            lost = max(one["lost"] for one in pairs.values())
            text = f"{lost:.2%} of segments sent again at worst"
            judged["loss"] = Row(f"loss {kind}", text, f"at most {LOSS:.1%}")
        result += [row.about(blame(slow[name], pairs, hosts), WORSE, FIXES[name]) for name, row in judged.items()]
    return result

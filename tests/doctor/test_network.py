"""A dead, slow or hanging rank, host or pair is named, whichever of the others would see it."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2.run.process.runtime import World
from fsdp2_tools.doctor import collectives, network
from fsdp2_tools.doctor.asking import Asker, Here
from fsdp2_tools.doctor.judging import BAD, OK, WORSE, Hosts
from tests.doctor.launch import start
from tests.doctor.threads import examined
from tests.harness import Ranks

EIGHT = Hosts({rank: (f"n{rank // 2}", f"10.0.0.{rank // 2}") for rank in range(8)})
SIZE = 1 << 20
ALL = list(combinations(range(8), 2))


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_few_ranks_meet_in_every_pair_once(count: int) -> None:
    rounds = network.schedule(count)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(count), 2))
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)


@pytest.mark.parametrize("count", [9, 64, 1000])
def test_many_ranks_meet_in_few_rounds_and_nobody_is_left_out(count: int) -> None:
    rounds = network.schedule(count)
    assert len(rounds) == (count - 1).bit_length()
    assert {rank for pairs in rounds for pair in pairs for rank in pair} == set(range(count))
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)


def measured(slow: Sequence[tuple[int, int]] = (), **changed: Any) -> dict[tuple[int, int], dict[str, Any]]:
    good = {"trip": 5e-5, "rate": 4e9, "link": 4e9, "lost": 0.0, "again": 0}
    return {pair: {**good, **(changed if pair in slow else {})} for pair in ALL}


def test_pairs_alike_are_fit() -> None:
    assert {row.verdict for row in network.rows(measured(), EIGHT, SIZE)} == {OK}


@pytest.mark.parametrize(
    ("slow", "who"),
    [
        ([pair for pair in ALL if 5 in pair], "rank 5 (n2)"),
        ([pair for pair in ALL if len({2, 3} & set(pair)) == 1], "host n1"),
        ([(0, 6), (0, 7), (1, 6), (1, 7)], "hosts n0 and n3"),
        ([(0, 6)], "ranks 0 and 6 (n0, n3)"),
        ([pair for pair in ALL if 5 in pair] + [(0, 6)], "rank 5 (n2); ranks 0 and 6 (n0, n3)"),
    ],
)
def test_the_smallest_cause_is_named(slow: list[tuple[int, int]], who: str) -> None:
    assert network.blame(slow, ALL, EIGHT) == who


def test_of_two_hosts_neither_is_named_alone() -> None:
    two = Hosts({rank: ("ab"[rank // 2], "") for rank in range(4)})
    every = list(combinations(range(4), 2))
    between = [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert network.blame(between, every, two) == network.blame(between, between, two) == "hosts a and b"
    assert network.blame([(0, 2), (0, 3)], between, two) == "rank 0 (a)"


def test_a_row_about_many_stays_a_line() -> None:
    hosts = Hosts({rank: (f"n{rank // 8}", "") for rank in range(1024)})
    every = [pair for pairs in network.schedule(1024) for pair in pairs]
    said = network.blame(every, every, hosts)
    assert said.startswith("host n0; host n1; ")
    assert said.endswith(" more")
    assert len(said) < 200


def test_gloo_s_interface_is_the_one_that_is_measured() -> None:
    assert network.own_address(False, "lo") == "127.0.0.1"
    with pytest.raises(OSError, match="no interface"):
        network.own_address(False, "no-such0")


@pytest.mark.parametrize(
    ("changed", "name", "verdict"),
    [
        ({"trip": 0.005}, "round trip between hosts", WORSE),
        ({"rate": 1e7}, "bandwidth between hosts", WORSE),
        ({"lost": 0.02, "again": 90}, "loss between hosts", WORSE),
        ({"error": "timed out"}, "connection", BAD),
    ],
)
def test_a_pair_that_is_slow_lossy_or_dead_is_a_row(changed: dict[str, Any], name: str, verdict: str) -> None:
    findings = [row for row in network.rows(measured([(0, 6)], **changed), EIGHT, SIZE) if row.verdict != OK]
    assert [(row.name, row.verdict, row.who) for row in findings] == [(name, verdict, "ranks 0 and 6 (n0, n3)")]


def on_shared_links(hosts: Hosts, *, first: float = 0.01) -> Any:
    """Pairs whose hosts have a link of 10 GB/s each, where a host's pairs share it. At first the first has a part."""
    late = iter([first])

    def meet(here: Here, pairs: list[list[int]], size: int, number: int) -> Any:
        mine = next((pair for pair in pairs if here.world.rank in pair), None)
        if mine is None:
            return None
        far = [pair for pair in pairs if hosts.of[pair[0]] != hosts.of[pair[1]]]
        beside = [sum(hosts.of[rank] in (hosts.of[a], hosts.of[b]) for a, b in far) for rank in mine if mine in far]
        rate = 10e9 / max([1, *beside]) * (next(late, 1.0) if here.world.rank == 0 else 1.0)
        return {"other": sum(mine) - here.world.rank, "rate": rate, "trip": 1e-4, "again": 0, "sent": 9}

    return meet


@pytest.mark.parametrize("a_host", [1, 2, 4, 8])
def test_a_link_is_as_fast_as_the_pairs_that_share_it_together(a_host: int) -> None:
    """In every pair and in a tournament, whether a host's pairs met at once or one was measured again, alone."""
    ranks = max(4, 2 * a_host)
    hosts = Hosts({rank: (f"n{rank // a_host}", "") for rank in range(ranks)})
    found = examined(ranks, {"meet": on_shared_links(hosts)}, lambda asker: network.ask_pairs(asker, hosts, SIZE))
    assert {pair: one["link"] for pair, one in found.items()} == pytest.approx(dict.fromkeys(found, 10e9))


def test_every_pair_that_was_dead_or_slow_is_measured_again() -> None:
    """A crowd at the first meeting: more pairs than ranks, at the size that is judged."""

    def meet(here: Here, pairs: list[list[int]], size: int, number: int) -> Any:
        rank = here.world.rank
        mine = next((pair for pair in pairs if rank in pair), None)
        if mine is None:
            return None
        late = number < 7 and sum(mine) % 2  # half of the pairs
        if late and rank % 3:
            return {"other": sum(mine) - rank, "error": "timed out"}
        return {"other": sum(mine) - rank, "rate": 1e8 if late else 4e9, "trip": 1e-4, "again": 0, "sent": 9}

    size = 16 << 20
    found = examined(8, {"meet": meet}, lambda asker: network.ask_pairs(asker, EIGHT, size))
    assert network.slow_pairs(found, EIGHT, size) == []


@pytest.mark.alone
def test_a_rank_that_came_too_late_meets_at_the_next_try() -> None:
    """The other one's connection of the first try is closed, and waits to be taken."""

    def late(here: Here, **arguments: Any) -> Any:
        if here.world.rank == 1 and arguments["number"] == 0:
            time.sleep(0.7 * here.seconds)
        return network.meet(here, **arguments)

    def ask(asker: Asker) -> Any:
        hosts = Hosts({rank: tuple(one) for rank, one in asker.ask("hello").items()})
        return network.ask_pairs(asker, hosts, SIZE), asker._number

    found, questions = examined(2, {"hello": network.hello, "meet": late}, ask, seconds=2.0)
    assert "error" not in found[0, 1]
    assert questions == 1 + 2


def refusing(here: Here, **arguments: Any) -> Any:
    """Rank 2's port is blocked."""
    if here.world.rank == 2:
        here.kept["listener"].close()
    return network.meet(here, **arguments)


@pytest.mark.alone
def test_real_connections_are_measured_and_a_blocked_port_names_its_rank() -> None:
    def ask(asker: Asker) -> Any:
        hosts = Hosts({rank: tuple(one) for rank, one in asker.ask("hello").items()})
        found = network.ask_pairs(asker, hosts, SIZE)
        return found, network.rows(found, hosts, SIZE)

    found, rows = examined(4, {"hello": network.hello, "meet": network.meet}, ask)
    assert sorted(found) == list(combinations(range(4), 2))
    assert all(0 < one["trip"] < 1 and one["rate"] > 0 for one in found.values())
    assert BAD not in {row.verdict for row in rows}

    found, rows = examined(4, {"hello": network.hello, "meet": refusing}, ask, seconds=2.0)
    assert sorted(pair for pair, one in found.items() if "error" in one) == [(0, 2), (1, 2), (2, 3)]
    assert (rows[0].name, rows[0].verdict, rows[0].who[:6]) == ("connection", BAD, "rank 2")


def by_members(bad: set[int]) -> Any:
    """Whether a group hangs that has one rank, or both of two, of these."""
    return lambda part: bad <= set(part)


@pytest.mark.parametrize("count", [2, 3, 5, 8, 64])
def test_a_hanging_group_is_bisected_until_its_rank_or_pair_is_known(count: int) -> None:
    members = list(range(count))
    if count > 2:  # of two ranks neither is known to be the cause
        for one in members:
            assert collectives.guilty(by_members({one}), members) == [one]
    for pair in list(combinations(members, 2))[:: max(1, count // 8)]:
        assert collectives.guilty(by_members(set(pair)), members) == list(pair)


def exchange(hanging: int | None) -> Any:
    """Collectives of 3 ranks, one of which may never come to them."""
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    questions = {"collectives": collectives.measure}
    if rank == hanging:
        questions["collectives"] = lambda here, **arguments: time.sleep(3600)
    asker = Asker(Here(World(rank, 3, rank, 3), torch.device("cpu"), dist.PrefixStore("doctor", store), 2.0), questions)
    if rank != 0:
        asker.serve()
        return None
    hosts = Hosts(dict.fromkeys(range(3), ("vm", "127.0.0.1")))
    found, stuck = collectives.ask_collectives(asker, [1 << 16], hosts)
    asker.end(None)
    return found, [(row.verdict, row.who) for row in [*stuck, *collectives.rows(found, [1 << 16], 1.0, hosts)]]


def test_collectives_are_timed(ranks: Ranks) -> None:
    found, rows = ranks.run(exchange, None, ranks=3)[0]
    assert set(found) == {0, 1, 2}
    assert rows == [(OK, ""), (OK, "")]
    assert min(found[0].values()) > 0


def test_a_rank_that_hangs_in_a_launcher_s_group_is_named(tmp_path: Path) -> None:
    pool = Ranks(tmp_path)  # its own, whose ranks are left in the midst of it
    try:
        assert pool.run(exchange, 1, ranks=3)[0] == ({}, [(BAD, "rank 1 (vm)")])
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("fault", "flags"), [("late", ["--quick", "--answer-within=6"]), ("held", ["--doctor", "--max-steps=1"])]
)
def test_a_rank_that_never_comes_to_a_collective_is_named(tmp_path: Path, fault: str, flags: list[str]) -> None:
    """Also where no thread returns from its collective: the report comes, and each process ends."""
    ranks = start(flags, ranks=3, cwd=tmp_path, fault=fault, at=1)
    try:
        text, _ = ranks[0].communicate(timeout=100)
        assert ranks[0].returncode == 2, text
        (row,) = (line for line in text.splitlines() if line.removeprefix("doctor: ").startswith("bad"))
        assert row.removeprefix("doctor: ").split()[1] == "collectives"
        assert "rank 1 (" in text
        for one in ranks[1:]:
            one.terminate()  # as torchrun does when a rank has ended
            assert one.wait(30) in (2, -signal.SIGTERM)
    finally:
        for one in ranks:
            one.kill()


@pytest.mark.parametrize(
    ("device", "stood", "who", "asked"),
    [
        ("cuda", "2212", "rank 2 (n1)", 1),  # behind the others
        ("cuda", "2222", "hosts n0, n1", 1),  # whose fault it is would need parts of them
        ("cpu", "2222", "rank 2 (n1)", 8),
    ],
)
def test_parts_of_the_ranks_are_tried_on_the_cpu_alone(
    monkeypatch: pytest.MonkeyPatch, device: str, stood: str, who: str, asked: int
) -> None:
    """Rank 2's collectives hang with everyone, at the numbers that are given."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def hangs(here: Here, members: list[int], **arguments: Any) -> Any:
        here.doing = f"{stood[here.world.rank]}. all-gather of 64 bytes"
        if here.world.rank not in members:
            return None
        return time.sleep(3600) if 2 in members else {}

    def ask(asker: Asker) -> Any:
        asker.here.device = torch.device(device)
        found, rows = collectives.ask_collectives(asker, [64], EIGHT)
        assert found == {}
        return rows, asker._number

    ((row,), questions) = examined(4, {"collectives": hangs}, ask, seconds=0.3)
    assert (row.name, row.verdict, row.who) == ("collectives", BAD, who)
    assert ("parts of them can't be tried on GPUs" in row.measured) == (device == "cuda" and len(set(stood)) == 1)
    assert row.measured.startswith(f"{stood[2]}. all-gather of 64 bytes: stands in ")
    assert questions == asked


def test_a_group_that_was_only_too_slow_is_worse_and_nobody_is_named_for_it() -> None:
    def slow(here: Here, members: list[int], sizes: list[int], key: str) -> Any:
        here.doing = f"1. all-reduce of {max(sizes)} bytes"
        return time.sleep(3600) if max(sizes) > 1 << 20 else {}

    def ask(asker: Asker) -> Any:
        return collectives.ask_collectives(asker, [1 << 16, 1 << 25], EIGHT)

    found, (row,) = examined(4, {"collectives": slow}, ask, seconds=0.3)
    assert found == {}
    assert (row.verdict, row.who) == (WORSE, "hosts n0, n1")
    assert row.measured.endswith("; with 64 KiB all end")


def test_nccl_s_watchdog_never_ends_an_examination() -> None:
    longest = 3600.0  # that --answer-within takes
    here = {kind: Here(World(0, 2, 0, 2), torch.device(kind), None, longest) for kind in ("cpu", "cuda")}
    assert collectives.patience(here["cpu"]).total_seconds() < longest
    assert collectives.patience(here["cuda"]).total_seconds() > 10 * longest

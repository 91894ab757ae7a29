"""Faults that are real, found by an examination as a user starts it: bad paths, a firewall, a clock, a CPU quota."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.launch import start
from tests.doctor.switch import Faults, Switch

pytestmark = pytest.mark.slow

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


def report(folder: Path, *flags: str, ranks: int = 3, **options: Any) -> list[dict[str, str]]:
    """The rows of an examination."""
    first, *others = start(["--quick", "--json", *flags], ranks=ranks, cwd=folder, **options)
    try:
        text, _ = first.communicate(timeout=200)
        found = json.loads(text[text.index("{\n") :])
        assert first.returncode == found["status"]
        rows: list[dict[str, str]] = found["rows"]
        return rows
    finally:
        for one in (first, *others):
            one.kill()
            one.wait()


def findings(folder: Path, *flags: str, **options: Any) -> dict[str, tuple[str, str]]:
    """Verdict and whom it is about, by row, of an examination's findings."""
    rows = report(folder, *flags, **options)
    return {row["name"]: (row["verdict"], row["who"]) for row in rows if row["verdict"] != "ok"}


def on_three_hosts(folder: Path, faults: Faults, before: Sequence[str] = ("true", "true", "true")) -> dict[str, Any]:
    with Switch(folder, 3, faults) as switch:
        around = [switch.around(host, line) for host, line in enumerate(before)]
        return findings(folder, around=around)


@pytest.mark.alone
def test_a_path_that_delays_or_loses_and_a_small_dev_shm_name_their_hosts(tmp_path: Path) -> None:
    faults = Faults(delay={(0, 2): 0.02}, loss={(1, 2): 0.02})
    found = on_three_hosts(tmp_path, faults, ["true", "mount -t tmpfs -o size=64M none /dev/shm", "true"])
    assert found["round trip between hosts"] == ("worse", "hosts h0 and h2")
    assert found["loss between hosts"] == ("worse", "hosts h1 and h2")
    assert found["/dev/shm"] == ("worse", "rank 1 (h1)")


def test_a_firewall_in_front_of_a_host_names_it(tmp_path: Path) -> None:
    found = on_three_hosts(tmp_path, Faults(delay={}, loss={}, closed=frozenset({2})))
    assert found["connection"] == ("bad", "rank 2 (h2)")


@pytest.mark.alone
def test_a_link_that_pairs_share_is_measured_as_one_that_a_pair_has_alone(tmp_path: Path) -> None:
    """Two hosts of two ranks. Two pairs may take turns at the two directions of their link: at most twice its rate."""
    rate = 4e6
    with Switch(tmp_path, 2, Faults(delay={}, loss={}, rate=rate)) as switch:
        around = [switch.around(host) for host in (0, 0, 1, 1)]
        rows = report(tmp_path, ranks=4, around=around, fault="pairs", LOCAL_WORLD_SIZE="2")
    links = [(row["name"], float(row["measured"])) for row in rows]
    between = [link for name, link in links if name not in ("0 1", "2 3")]
    assert len(between) == 4 + 1
    assert all(0.7 * rate < link < 2.1 * rate for link in between), links
    assert 0.7 * rate < between[-1] < 1.1 * rate, links  # alone


@pytest.mark.skipif(not FAKETIME.exists(), reason="needs libfaketime (apt-get install faketime)")
def test_a_clock_that_is_an_hour_off_names_its_host(tmp_path: Path) -> None:
    wrong = f"export LD_PRELOAD={FAKETIME} FAKETIME=+1h FAKETIME_DONT_FAKE_MONOTONIC=1"
    found = on_three_hosts(tmp_path, Faults(delay={}, loss={}), ["true", "true", wrong])
    assert found["clocks"] == ("bad", "rank 2 (h2)")


@pytest.fixture
def quota() -> Iterator[Path]:
    """A cgroup whose processes together get a tenth of a core."""
    parent = Path("/sys/fs/cgroup/cpu")
    old = parent.is_dir()  # cgroups v1
    group = (parent if old else parent.parent) / f"fsdp2-doctor-{os.getpid()}"
    try:
        group.mkdir()
        if old:
            (group / "cpu.cfs_quota_us").write_text("10000")
        else:
            (group / "cpu.max").write_text("10000 100000")
    except OSError as error:
        pytest.skip(f"needs a cgroup with a quota of CPU time: {error}")
    yield group
    group.rmdir()


def test_a_rank_with_a_cpu_quota_is_named(tmp_path: Path, quota: Path) -> None:
    found = findings(tmp_path, ranks=2, fault=f"quota {quota}", at=1)
    who = f"rank 1 ({os.uname().nodename})"
    assert found["cores"] == ("worse", who)
    assert found["matrix product"] == ("worse", who)


def test_a_rank_on_which_all_reduce_hangs_is_found_by_bisection(tmp_path: Path) -> None:
    found = findings(tmp_path, "--answer-within=4", ranks=4, fault="frozen all_reduce", at=2)
    assert found["collectives"] == ("bad", f"rank 2 ({os.uname().nodename})")

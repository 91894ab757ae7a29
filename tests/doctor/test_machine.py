"""What differs between machines, or is too small, is a row that names the rank or host."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2.run.process import limits
from fsdp2.run.process.runtime import World
from fsdp2_tools.doctor import clock, machine
from fsdp2_tools.doctor.asking import Here
from fsdp2_tools.doctor.judging import BAD, OK, WORSE, Hosts, Row
from tests.doctor.threads import examined

DOCS = Path(__file__).parents[2] / "docs" / "doctor.md"
HOSTS = Hosts({0: ("a", "10.0.0.1"), 1: ("a", "10.0.0.1"), 2: ("b", "10.0.0.2"), 3: ("b", "10.0.0.2")})


@pytest.fixture(scope="module")
def facts() -> dict[int, Any]:
    """Four ranks alike, each with a core of its own."""
    here = Here(World(0, 1, 0, 1), torch.device("cpu"), dist.HashStore(), 5.0)
    mine = machine.measure(here) | {"loopback": False, "quota": None, "threads": 1}
    return {rank: mine | {"cores": [rank % 2]} for rank in range(4)}


def found(facts: dict[int, Any], rank: int, **changed: Any) -> list[Row]:
    """The findings if one rank's facts are changed."""
    changed_facts = copy.deepcopy(facts)
    for name, value in changed.items():
        changed_facts[rank][name] = {**facts[rank][name], **value} if isinstance(value, dict) else value
    return [row for row in machine.rows(changed_facts, HOSTS) if row.verdict != OK]


def test_each_row_has_a_line_on_the_page_and_a_test(facts: dict[int, Any]) -> None:
    table = re.findall(r"^\| ([^|]+) \|", DOCS.read_text(), re.MULTILINE)
    on_page = {name.removeprefix("GPU ") for cell in table for name in re.sub(r"\[\^.*?\]", "", cell).split(", ")}
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("*.py"))
    source = "".join(file.read_text() for file in Path(machine.__file__).parent.glob("*.py"))
    names = {
        *re.findall(r'(?:Row|limit|same|beside_median)\("([^"]+)"', source),
        *(row.name for row in machine.rows(facts, HOSTS)),
    }
    assert len(names) > 15
    assert {name for name in names if name.removeprefix("GPU ") not in on_page} == set(), "add it to docs/doctor.md"
    assert {name for name in names if f'"{name}' not in tests} == set(), "add a case to tests/doctor"


def test_ranks_alike_are_fit(facts: dict[int, Any]) -> None:
    assert found(facts, 0) == []
    names = [row.name for row in machine.rows(facts, HOSTS)]
    assert {"versions", "variables"} < {*names}  # a row each where none differs


@pytest.mark.parametrize(
    ("rank", "changed", "name", "verdict", "who"),
    [
        (1, {"same": {"torch": "2.14.0"}}, "torch", BAD, "rank 1 (a)"),
        (3, {"same": {"fsdp2": "0123"}}, "fsdp2", BAD, "rank 3 (b)"),
        (3, {"same": {"driver": "550.54"}}, "driver", WORSE, "rank 3 (b)"),
        (2, {"environment": {"NCCL_ALGO": "Ring"}}, "variable NCCL_ALGO", WORSE, "rank 2 (b)"),
        (2, {"shm": [64 << 20, 64 << 20]}, "/dev/shm", WORSE, "rank 2 (b)"),
        (0, {"nofile": 256}, "open files", WORSE, "rank 0 (a)"),
        (2, {"infiniband": True, "memlock": 65536}, "locked memory", WORSE, "rank 2 (b)"),
        (2, {"memory": 1 << 20}, "free memory", WORSE, "rank 2 (b)"),
        (1, {"quota": 0.5}, "cores", WORSE, "rank 1 (a)"),
        (2, {"loopback": True}, "host name", BAD, "rank 2 (b)"),
    ],
)
def test_a_rank_that_differs_is_named(
    facts: dict[int, Any], rank: int, changed: dict[str, Any], name: str, verdict: str, who: str
) -> None:
    (row,) = found(facts, rank, **changed)
    assert (row.name, row.verdict, row.who) == (name, verdict, who)
    assert row.fix


def test_a_system_without_dev_shm_has_no_row_about_it(facts: dict[int, Any]) -> None:
    rows = machine.rows({rank: one | {"shm": None} for rank, one in facts.items()}, HOSTS)
    assert not [row for row in rows if row.name == "/dev/shm" or row.verdict != OK]


def test_variables_of_cuda_are_compared_but_for_a_rank_s_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as Ray gives each rank its own
    here = Here(World(0, 1, 0, 1), torch.device("cpu"), None, 5.0)
    assert [name for name in machine.measure(here)["environment"] if name.startswith("CUDA")] == [
        "CUDA_DEVICE_MAX_CONNECTIONS"
    ]


def test_ranks_that_share_a_core_are_named(facts: dict[int, Any]) -> None:
    (row,) = found(facts, 2, cores=[1])  # rank 3's
    assert (row.name, row.who) == ("cores", "host b")


def test_a_gpu_that_is_hot_broken_or_in_use_is_named(facts: dict[int, Any]) -> None:
    good = {"name": "H100", "free": 79 << 30, "total": 80 << 30, "throttled": "0x0000000000000001", "ecc": "0",
            "width": "16", "most width": "16", "clock": "1980"}  # fmt: skip
    ranks = {rank: one | {"gpu": good} for rank, one in facts.items()}
    assert found(ranks, 0) == []
    changed = {"throttled": "0x0000000000000028", "ecc": "3", "free": 9 << 30, "width": "8", "clock": "1200"}
    rows = found(ranks, 3, gpu=changed)
    assert [(row.name, row.verdict) for row in rows] == [
        ("GPU memory in use", WORSE),
        ("GPU throttled", WORSE),
        ("GPU memory errors", BAD),
        ("GPU PCIe lanes", WORSE),
        ("GPU clock", WORSE),
    ]
    assert {row.who for row in rows} == {"rank 3 (b)"}
    assert rows[1].measured == "hardware slowdown, too hot"


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/job/step", {"job/cpu.max": "150000 100000", "job/step/cpu.max": "max 100000",
                          "job/memory.max": "2000", "job/memory.current": "800", "job/step/memory.max": "max",
                          "job/memory.stat": "anon 400\ninactive_file 300"}),
        ("4:cpu,cpuacct:/job\n3:memory:/job", {
            "cpu/job/cpu.cfs_quota_us": "150000", "cpu/job/cpu.cfs_period_us": "100000", "cpu/cpu.cfs_quota_us": "-1",
            "memory/job/memory.limit_in_bytes": "2000", "memory/job/memory.usage_in_bytes": "800",
            "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 300",
            "memory/memory.limit_in_bytes": str(2**63 - 4096)}),
    ],
    ids=["v2", "v1"],
)  # fmt: skip
def test_the_tightest_cgroup_above_counts_and_pages_of_files_are_free(
    tmp_path: Path, line: str, files: dict[str, str]
) -> None:
    meminfo = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 4 kB"}
    for name, text in {
        "proc/self/cgroup": line,
        **meminfo,
        **{f"sys/fs/cgroup/{k}": v for k, v in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert limits.cpu_quota(tmp_path) == 1.5
    assert limits.free_memory(tmp_path) == 1500
    (tmp_path / "proc/self/cgroup").write_text("")
    assert limits.cpu_quota(tmp_path) is None
    assert limits.free_memory(tmp_path) == 4096
    (tmp_path / "proc/meminfo").unlink()
    assert limits.free_memory(tmp_path) is None


def test_docker_s_small_dev_shm_is_found() -> None:
    """A real file system of 64 MB, in a mount namespace of its own."""
    program = "import shutil; print(shutil.disk_usage('/dev/shm').free)"
    line = f'mount -t tmpfs -o size=64M none /dev/shm && exec {sys.executable} -c "{program}"'
    done = subprocess.run(["unshare", "-m", "sh", "-c", line], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting in a namespace of its own needs root: {done.stderr.strip()}")
    assert int(done.stdout) < machine.SHM_PER_RANK


@pytest.mark.parametrize(("ahead", "verdict"), [(0.0, OK), (-3.0, WORSE), (3600.0, BAD)])
def test_a_clock_that_is_wrong_names_its_host(ahead: float, verdict: str) -> None:
    def theirs(here: Here) -> float:
        return time.time() + (ahead if here.world.rank in (2, 3) else 0.0)

    found = examined(4, {"clock": theirs}, clock.ask_clocks)
    (row,) = clock.rows(found, HOSTS)
    assert row.verdict == verdict
    assert row.who == ("" if verdict == OK else "host b")
    for rank, (measured, error) in found.items():
        assert abs(measured - (ahead if rank > 1 else 0.0)) < error + 0.01


def test_of_three_hosts_the_odd_clock_is_named_also_where_it_is_rank_0_s() -> None:
    hosts = Hosts({rank: (f"n{rank // 2}", "") for rank in range(6)})
    found = {rank: (0.0 if rank < 2 else 3600.0, 0.001) for rank in range(6)}
    (row,) = clock.rows(found, hosts)
    assert (row.verdict, row.who) == (BAD, "host n0")

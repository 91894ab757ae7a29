"""Limits of a process on its host: the memory and CPU time that its cgroups leave it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take: of the machine, and within its cgroups. None where /proc isn't Linux's.

    Pages of files that nobody uses are free: the kernel drops them before it refuses anything.
    """
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():  # macOS
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = [int(lines["MemAvailable"].split()[0]) << 10]
    for old, folder in _cgroups(root):
        limit = _number(folder / ("memory.limit_in_bytes" if old else "memory.max"))
        if limit is None or limit >= 1 << 60:  # v1 writes a huge number for none
            continue
        used = _number(folder / ("memory.usage_in_bytes" if old else "memory.current")) or 0.0
        free.append(int(limit - used) + _inactive_file(folder / "memory.stat"))
    return max(0, min(free))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs whose time this process gets at most; None without a limit."""
    quotas = []
    for old, folder in _cgroups(root):
        quota = _number(folder / ("cpu.cfs_quota_us" if old else "cpu.max"))
        period = _number(folder / "cpu.cfs_period_us") if old else _number(folder / "cpu.max", 1)
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _cgroups(root: Path) -> Iterator[tuple[bool, Path]]:
    """All cgroups above this process, of both hierarchies of Linux; true for those of v1. The tightest counts."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    hierarchies = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):  # v2 has one hierarchy, without a name
            place = hierarchies / controller / path.lstrip("/")
            for folder in (place, *place.parents):
                if folder.is_relative_to(hierarchies):
                    yield controller != "", folder


def _number(file: Path, word: int = 0) -> float | None:
    try:
        return float(file.read_text().split()[word])
    except (OSError, ValueError, IndexError):  # there is no such limit, or it says max
        return None


def _inactive_file(stat: Path) -> int:
    """v1 counts the pages of a cgroup and those below it as total_inactive_file, v2 as inactive_file."""
    try:
        pairs = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(pairs.get("total_inactive_file", pairs.get("inactive_file", 0)))

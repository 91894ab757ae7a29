"""A power cut at any moment leaves each checkpoint whole or absent, and each sync of the protocol is needed for it."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from fsdp2.checkpoint.files import Files
from fsdp2.checkpoint.store import DamagedCheckpoint, Store, verify
from tests.faults import MemoryFiles, Op, PowerCut, recording
from tests.harness import Ranks, python_environment, save

STEPS, KEEP = (1, 2, 3), 2


class NotingStore(Store):
    """Notes when a commit has returned: from then on the checkpoint is promised."""

    log: list[tuple[float, Op]]

    def commit(self, step: int, files: Mapping[str, Mapping[str, Any]], info: Mapping[str, Any]) -> None:
        super().commit(step, files, info)
        self.log.append((time.monotonic(), ("promise", step)))


def _save_and_record(base: str) -> list[tuple[float, Op]]:
    """Three saves on these ranks, with retention; every change that this rank made."""
    log: list[tuple[float, Op]] = []
    store = NotingStore(recording(log)(Path(base) / "checkpoints"))
    store.log = log
    for step in STEPS:
        state = {"weight": torch.full((3, 4), float(step)), "rank": {str(dist.get_rank()): torch.ones(5) * step}}
        save(store, state, step, keep=KEEP)
    return log


@pytest.fixture(scope="module")
def record(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Op]]:
    """The folder, and what two ranks did to it, in order: they read the same clock."""
    base = tmp_path_factory.mktemp("power")
    logs = ranks.run(_save_and_record, str(base))
    return str(base), [op for _, op in sorted((entry for log in logs for entry in log), key=lambda entry: entry[0])]


def broken_promises(base: str, ops: list[Op], seed: int = 1) -> list[str]:
    """What is wrong after a power cut at some moment; empty if nothing ever is."""
    generator, cut, promised = random.Random(seed), PowerCut(base), set[int]()
    for number, op in enumerate(ops):
        if op[0] == "promise":
            promised.add(op[1])
        else:
            cut.do(op)
        if op[0] == "unlink" and op[1].endswith("COMMIT.json"):
            promised.discard(int(re.findall(r"step-(\d+)", op[1])[0]))
        for tree in cut.states(generator):
            store = Store(cast(Files, MemoryFiles(tree.get("checkpoints", {}), "checkpoints")))
            committed = store.committed()
            if missing := promised - set(committed):
                return [f"after {number}, {op[:2]}: {sorted(missing)} were promised and are lost"]
            for step in committed:
                try:
                    verify(store.checkpoint(step))
                except DamagedCheckpoint as error:
                    return [f"after {number}, {op[:2]}: {error}"]
    return []


def test_a_power_cut_at_any_moment_keeps_the_promises(record: tuple[str, list[Op]]) -> None:
    base, ops = record
    assert [op[1] for op in ops if op[0] == "promise"] == list(STEPS)
    assert sum(op[0] == "unlink" and op[1].endswith("COMMIT.json") for op in ops) == len(STEPS) - KEEP
    for seed in range(3):
        assert broken_promises(base, ops, seed) == []


def _site(base: str, ops: list[Op], number: int) -> str | None:
    """Which sync of the protocol an operation is; None if it is no sync."""
    if ops[number][0] != "fsync":
        return None
    path = ops[number][1].removeprefix(base).strip("/")
    name = re.sub(r"\d+", "N", path)
    if name == "checkpoints/step-N":
        before = ops[number - 1]
        return f"{name} after {before[0]} of {re.sub(r'[0-9]+', 'N', before[1].rsplit('/', 1)[-1])}"
    return name


SITES = {
    "": "the folder that holds the checkpoints' folder",
    "checkpoints": "the new directory's own entry",
    "checkpoints/step-N/__N_N.distcp": "each shard",
    "checkpoints/step-N/.metadata.tmp": "DCP's metadata",
    "checkpoints/step-N/COMMIT.json.tmp": "the marker before its rename",
    "checkpoints/step-N after fsync of COMMIT.json.tmp": "the entries of the shards before the marker's rename",
    "checkpoints/step-N after rename of COMMIT.json.tmp": "the marker's rename",
    "checkpoints/step-N after unlink of COMMIT.json": "the removal of an old marker before its files",
}


def test_these_are_all_syncs_of_the_protocol(record: tuple[str, list[Op]]) -> None:
    base, ops = record
    assert {_site(base, ops, i) for i in range(len(ops))} - {None} == set(SITES)


@pytest.mark.parametrize("site", SITES, ids=list(SITES.values()))
def test_without_any_one_sync_a_promise_breaks(record: tuple[str, list[Op]], site: str) -> None:
    base, ops = record
    without = [op for number, op in enumerate(ops) if _site(base, ops, number) != site]
    assert len(without) < len(ops)
    assert any(broken_promises(base, without, seed) for seed in range(3))


def test_the_record_is_complete(tmp_path: Path) -> None:
    """What the record says is what the kernel was asked to do, in the same order."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    script = textwrap.dedent(
        """
        import sys, torch.distributed as dist
        from tests.test_power_loss import _save_and_record
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for _, op in _save_and_record(sys.argv[1]):
            if op[0] != "data":
                print(*op)
        """
    )
    base, trace = tmp_path / "base", tmp_path / "trace"
    base.mkdir()
    calls = "openat,creat,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,fsync,fdatasync,link,symlink"
    command = ["strace", "-f", "-y", "-e", f"trace={calls}", "-o", str(trace), sys.executable, "-c", script, str(base)]
    result = subprocess.run(
        command, cwd=Path(__file__).parent.parent, env=python_environment(), capture_output=True, text=True, timeout=240
    )
    if result.returncode and "PTRACE" in result.stderr:
        pytest.skip("this machine allows no tracing")
    assert result.returncode == 0, result.stderr
    recorded = [tuple(line.split()) for line in result.stdout.splitlines() if not line.startswith("promise")]
    assert _system_calls(trace.read_text(), str(base)) == recorded


def _system_calls(trace: str, base: str) -> list[tuple[str, ...]]:
    """The successful changes below `base`, in the words of the record."""
    found: list[tuple[str, ...]] = []
    for line in trace.splitlines():
        if base not in line or "= -1" in line:
            continue
        call = line.split("(")[0].split()[-1]
        paths = [p for p in re.findall(r'"([^"]*)"', line) if p.startswith(base)]
        if call in ("openat", "creat"):
            if "O_CREAT" in line or call == "creat":
                found.append(("create", paths[0]))
        elif call in ("fsync", "fdatasync"):
            found.append(("fsync", re.findall(r"<([^>]*)>", line)[0]))
        elif call.startswith("rename"):
            found.append(("rename", *paths))
        elif call.startswith("mkdir"):
            found.append(("mkdir", *paths))
        elif call == "rmdir" or "AT_REMOVEDIR" in line:
            found.append(("rmdir", *paths))
        else:
            found.append((call.removesuffix("at"), *paths))
    return found

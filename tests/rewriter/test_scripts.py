"""Whole scripts: nothing is left to decide, and both print the same, losses to the last bit, on 2 ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from migration.rewriter.check import load
from migration.rewriter.rewrite import rewrite
from tests.harness import Ranks, python_environment
from tests.migrate.fsdp1_models import OLD, needs_fsdp1_to_gather

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))


def printed(pairs: list[tuple[str, str]], port: int) -> dict[str, str]:
    """What scripts print on this rank, each in a process group that it makes by itself as under torchrun."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    found = {}
    before = dict(os.environ)
    try:
        for offset, (path, scratch) in enumerate(pairs):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), SCRATCH=scratch)
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port + offset))
            output = io.StringIO()
            arguments, sys.argv = sys.argv, [path]
            with (
                contextlib.redirect_stdout(output),
                mock.patch.object(sys, "path", [str(Path(path).parent), *sys.path]),
            ):
                runpy.run_path(path, run_name="__main__")
            sys.argv = arguments
            found[path] = output.getvalue()
    finally:
        os.environ.clear()
        os.environ.update(before)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port + len(pairs)}", rank=rank, world_size=world)
    return found


def free_ports(count: int) -> int:
    """The first of some ports in a row that nothing listens on; two suites at once begin to look at different ones."""
    first = os.getpid() * 97 % 9000
    for start in (23000 + (first + offset) % 9000 for offset in range(0, 9000, 97)):
        with contextlib.ExitStack() as held:
            try:
                for port in range(start, start + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return start
    raise RuntimeError("no ports are free")


def moved(script: Path, folder: Path) -> Path:
    result = rewrite(load([str(script)])[0])
    assert [(problem.code, problem.why) for problem in result.undecided] == []
    path = folder / script.name
    path.write_bytes(result.files[0].data)
    for added in result.files[1:]:
        (folder / added.source.path.relative_to(script.parent)).parent.mkdir(exist_ok=True)
        (folder / added.source.path.relative_to(script.parent)).write_bytes(added.data)
    assert not re.search("torch.*FullyShardedDataParallel", path.read_text())
    assert rewrite(load([str(path)])[0]).files == []
    return path


def test_whole_scripts_give_the_same_losses(ranks: Ranks, tmp_path: Path) -> None:
    assert len(SCRIPTS) >= 12
    pairs: list[tuple[str, str]] = []
    for script in SCRIPTS:
        if script.name == "mnist.py":
            continue  # starts its ranks by itself
        if OLD and re.search(r"FULL_STATE_DICT|\.state_dict\(\)|summon_full_params", script.read_text()):
            continue
        for path in (script, moved(script, tmp_path)):
            scratch = tmp_path / f"{len(pairs)}"
            scratch.mkdir()
            pairs.append((str(path), str(scratch)))
    first, second = ranks.run(printed, pairs, free_ports(len(pairs) + 1), ranks=2, timeout=200)
    for results in (first, second):
        outputs = list(results.values())
        for number, path in enumerate(list(results)[::2]):
            assert outputs[2 * number] == outputs[2 * number + 1], path
    assert all(output.count("\n") >= 3 for output in first.values()), "the first rank prints the losses"


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def lines_of(command: list[str], folder: Path, **environment: str) -> list[str]:
    """The losses that a command prints."""
    # A rank of any script may abort after its last line: https://github.com/pytorch/pytorch/issues/190489
    for _ in range(6):
        ended = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=240,
            env={**python_environment(), "SCRATCH": str(folder), "OMP_NUM_THREADS": "1", **environment},
        )
        if "terminate called without an active exception" not in ended.stderr:
            break
    assert ended.returncode == 0, ended.stderr
    return [line for line in ended.stdout.splitlines() if re.match(r"Train|Test|\{|[\d-]", line)]


@pytest.mark.slow
@needs_fsdp1_to_gather
def test_the_tutorials_script_still_starts_its_ranks(tmp_path: Path) -> None:
    script = next(script for script in SCRIPTS if script.name == "mnist.py")
    before = lines_of([str(script)], tmp_path)
    assert len(before) == 5
    assert lines_of([str(moved(script, tmp_path))], tmp_path) == before


@pytest.mark.slow
def test_a_script_with_two_ways_runs_the_other_one_too(tmp_path: Path) -> None:
    """scaler_or_ddp.py without FSDP: what was DDP's stays DDP's."""
    script = next(script for script in SCRIPTS if script.name == "scaler_or_ddp.py")
    path = moved(script, tmp_path)
    before, after = (lines_of([*TORCHRUN, str(each)], tmp_path, MODE="ddp") for each in (script, path))
    assert before == after
    assert len(before) == 3

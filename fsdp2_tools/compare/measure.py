"""Runs a training as a user would, under torchrun, and reads what it has left."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.config import Config
from fsdp2.options.own_model import code_flags
from fsdp2.options.parser import to_flags
from fsdp2.report.records import read as read_records
from fsdp2.run.directory.rundir import RunDir
from fsdp2_tools.compare.variants import Row
from fsdp2_tools.memory.read import exchanges, last_steps, read_timelines
from fsdp2_tools.memory.series import Series, series

RECORDED_STEPS = 4
SHOWN_STEPS = 2  # the pictures of memory over time
POINTS = 1000
# torchrun that ends with this process, also where that is killed: 1 is prctl's PR_SET_PDEATHSIG, 15 SIGTERM.
TORCHRUN = """import ctypes, runpy, sys
sys.platform == "linux" and ctypes.CDLL(None).prctl(1, 15)
runpy.run_module("torch.distributed.run", run_name="__main__")"""


class RunFailed(Exception):
    """A training didn't end well; what it said last."""


@dataclass
class Measured:
    """The measurements of a row. Bytes are of the rank that had the most."""

    name: str
    ranks: int
    failed: str | None = None
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)  # of all repeats, without warming up
    samples: int = 0  # in a step, over all ranks
    peak_bytes: int = 0
    reserved_bytes: int | None = None  # by the allocator of a GPU
    by_kind: dict[str, int] = field(default_factory=dict)  # at the peak
    over_time: Series | None = None  # bytes by kind while it does its last steps
    exchanges: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> a step's count and bytes
    checkpoint_bytes: int = 0
    save_seconds: list[float] = field(default_factory=list)
    load_seconds: float | None = None


def measure(
    rows: Sequence[Row], folder: Path, *, steps: int, warm_up: int, repeats: int, say: Callable[[str], None]
) -> list[Measured]:
    """Each row `repeats` times, the rows in turn so that they share the machine's good and bad times, and in the
    opposite order every other time. Then once more each, from its checkpoint and with its memory recorded, which
    slows it."""
    found = {row.name: Measured(row.name, row.ranks, row.refused) for row in rows}
    for repeat in range(repeats):
        for row in rows if repeat % 2 == 0 else reversed(rows):
            say(f"repeat {repeat + 1} of {repeats}: {row.name}")
            _attempt(found[row.name], row, lambda row, result: _timed(row, result, folder, steps, warm_up))
    for row in rows:
        say(f"memory and loading: {row.name}")
        _attempt(found[row.name], row, lambda row, result: _recorded(row, result, folder, steps))
    return list(found.values())


def _attempt(result: Measured, row: Row, body: Callable[[Row, Measured], None]) -> None:
    if result.failed is not None:
        return
    try:
        body(row, result)
    except RunFailed as error:
        result.failed = str(error)


def _timed(row: Row, result: Measured, folder: Path, steps: int, warm_up: int) -> None:
    run = folder / f"{row.name.replace(' ', '-')}-{len(result.save_seconds) + 1}"
    records = train(row, run, max_steps=steps, checkpoint_every=None)
    trained = [record for record in records if record["kind"] == "train"]
    result.losses = [record["loss"] for record in trained]
    result.samples = trained[0]["samples"]
    result.step_ms += [record["step_ms"] for record in trained[warm_up:]]
    (saved,) = [record for record in records if record["kind"] == "checkpoint"][-1:]
    result.save_seconds.append(saved["seconds"])
    checkpoint = LocalFiles(run / "checkpoints" / Path(saved["path"]).name)
    result.checkpoint_bytes = sum(checkpoint.size(name) or 0 for name in checkpoint.list(""))


def _recorded(row: Row, result: Measured, folder: Path, steps: int) -> None:
    run = folder / f"{row.name.replace(' ', '-')}-1"
    records = train(row, run, max_steps=steps + RECORDED_STEPS, memory_snapshot=True)
    (resumed,) = [record for record in records if record["kind"] == "resume"]
    result.load_seconds = resumed["restore_seconds"]
    lines = read_timelines(LocalFiles(run), str(run))
    line = max(lines, key=lambda line: line.peak()[1])
    at, result.peak_bytes = line.peak()
    result.by_kind = line.by_kind(at)
    result.over_time = series(line, POINTS, last_steps(line, SHOWN_STEPS))
    result.exchanges = exchanges(line)
    if line.facts["device"] == "cuda":
        result.peak_bytes = max(line.facts["allocated_bytes"] for line in lines)
        result.reserved_bytes = max(line.facts["reserved_bytes"] for line in lines)


def train(row: Row, run: Path, **changed: Any) -> list[dict[str, Any]]:
    """The records of a run with a row's flags. Raises RunFailed with what it said last."""
    assert row.config is not None
    config: Config = dataclasses.replace(row.config, save_model=False, epochs=1_000_000, **changed)
    flags = run.with_suffix(".json")
    run.parent.mkdir(parents=True, exist_ok=True)
    flags.write_text(json.dumps({"flags": to_flags(config)}))
    result = torchrun(row.ranks, "fsdp2.train", f"--config={flags}", f"--run-dir={run}", *code_flags(row.config))
    if result.returncode != 0:
        raise RunFailed(reason(result.stderr or result.stdout))
    try:
        return read_records(RunDir(run).metrics)
    except ValueError as error:
        raise RunFailed(str(error)) from None


def torchrun(ranks: int, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module on so many ranks of this machine until they end."""
    command = [sys.executable, "-c", TORCHRUN, "--standalone", f"--nproc_per_node={ranks}", "-m", module, *arguments]
    # torchrun would set one thread for each of several ranks, and say so at length; a training sets its own.
    environment = {**({"OMP_NUM_THREADS": "1"} if ranks > 1 else {}), **os.environ}
    return run(command, env=environment)


def run(command: Sequence[str], **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. At a signal `subprocess.run` would kill torchrun, and so leave its ranks."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **settings) as process:
        try:
            out, errors = process.communicate()
        except BaseException:
            process.terminate()
            process.communicate()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def reason(output: str) -> str:
    """The line that says why, of what a failed run has printed: a rank, or else what torchrun says of the first."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    refused = [found[1] for line in lines if (found := re.search(r"fsdp2: (?:error|stopped): (.*)", line))]
    raised = [line for line in lines if _raised(line) and "ChildFailedError" not in line]
    ended = re.findall(r"Root Cause.*?traceback : ([^\n]+)", output, re.DOTALL)
    return (refused or raised or ended or lines or ["it ended without a word"])[0]


def _raised(line: str) -> bool:
    name = line.partition(":")[0].rpartition(".")[2]
    return name.endswith(("Error", "Reached", "Failed")) and name.isidentifier()


def memory_of_rank(ranks: int, device: str) -> int:
    """Bytes that each rank of this machine may use: the memory of its GPU, or its share of the machine's."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks

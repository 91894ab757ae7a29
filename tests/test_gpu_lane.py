"""Commands for a borrowed GPU: they end in time, leave no process, and go on where they left off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from fsdp2.config import Config, parse
from fsdp2.options.parser import flags_of_table
from tests.gpu.deadline import Deadline, descendants, run
from tests.gpu.junit import SLICES, slice_of

ROOT = Path(__file__).parent.parent


def test_an_item_begins_only_if_its_time_is_left() -> None:
    now = [100.0]
    until = Deadline(60, lambda: now[0])
    assert until.allows(60)
    now[0] = 130.0
    assert until.left() == 30
    assert until.allows(30)
    assert not until.allows(31)
    now[0] = 200.0
    assert until.left() == 0


# A rank in a session of its own, as torchrun starts it, whose launcher ends before it does.
STUCK = """
import os, subprocess, sys, time
os.chdir(os.path.dirname(__file__))
def rank_waits():
    if sys.argv[1] == "rank":
        open("new", "w").write(str(os.getpid()))
        os.rename("new", "pid")
    time.sleep(600)
if sys.argv[1] == "launcher":
    subprocess.Popen([sys.executable, __file__, "rank"], start_new_session=True)
    print("started", flush=True)
    while not os.path.exists("pid"):
        time.sleep(0.1)
    sys.exit(int(sys.argv[2])) if sys.argv[2] != "-" else rank_waits()
else:
    rank_waits()
"""


def test_what_is_stuck_prints_its_stacks_and_ends(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    before = set(descendants(os.getpid()))
    assert run([sys.executable, str(script), "launcher", "-"], 8.0, log=tmp_path / "log") is None
    assert set(descendants(os.getpid())) <= before
    log = (tmp_path / "log").read_text()
    assert log.startswith("started\n")
    assert log.count("in rank_waits") == 2


def test_an_orphan_ends_with_the_command_that_left_it(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    assert run([sys.executable, str(script), "launcher", "7"], 60.0) == 7
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


SUITE = """
import os, signal
from pathlib import Path
def test_passes():
    print("figures \\x00 of it")
    Path("passes").open("a").write("x")
def test_fails():
    assert Path("mended").exists()
def test_ends_the_process():
    assert Path("mended").exists() or os.kill(os.getpid(), signal.SIGKILL)
def test_comes_last():
    pass
"""


def test_a_run_of_tests_goes_on_from_its_junit_file(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    file = tmp_path / "junit.xml"

    def suite(seconds: float) -> dict[str, str]:
        variables = {"FSDP2_JUNIT": str(file), "FSDP2_UNTIL": str(time.time() + seconds), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.gpu.junit"]
        subprocess.run(command, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True)
        cases = ET.parse(file).getroot().iter("testcase") if file.is_file() else ()
        return {str(c.get("name")): next((e.tag for e in c if e.tag != "system-out"), "passed") for c in cases}

    assert suite(seconds=5) == {}  # the last slice's tests may take longer
    first = {"test_passes": "passed", "test_fails": "failure", "test_ends_the_process": "error"}
    assert suite(600) == first
    # What has not run comes before what has failed, and what has ended the process.
    assert suite(600) == {**first, "test_comes_last": "passed"}
    (tmp_path / "mended").touch()
    everything = dict.fromkeys([*first, "test_comes_last"], "passed")
    assert suite(600) == everything
    assert suite(600) == everything
    assert (tmp_path / "passes").read_text() == "x"
    assert "figures ? of it" in file.read_text()


def test_the_printed_commands_are_there_and_every_slice_has_a_test(tmp_path: Path) -> None:
    """Each is parsed by its program, which lists what it would do. The wheels' machine may have no make."""
    printed = subprocess.run(["make", "-s", "gpu-first", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True)
    lines = [line.strip() for line in printed.stdout.decode().splitlines()]
    suite, records, saves = (line.split()[1:] for line in lines if line.startswith("python3 "))

    def listed(*command: str) -> list[str]:
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert suite[2:] == ["--out", "results"]
    found = [line for line in listed(*suite[:2], "--collect-only", "-q") if "::" in line]
    assert {slice_of(nodeid) for nodeid in found} == set(SLICES)
    assert sum(slice_of(nodeid) == "first" for nodeid in found) == 8
    rows = listed(*records, "--dry-run")
    assert rows[0].startswith("1b, bf16: --device=cuda --model=llama")
    for row in rows:  # the flags are ones that a run takes
        parse(row.partition(": ")[2].split())
    assert listed(*saves, "--dry-run") == ["checkpoint", "prefetch", "calibration"]


def test_a_record_is_measured_once_and_is_a_trial_for_the_planner(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/records.py", "--device=cpu", "--quick", f"--out={tmp_path}", "--rows"]

    def records(pattern: str) -> str:
        done = subprocess.run([*command, pattern], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "1 of 1 rows are there" in records("^1b, bf16$")
    (row,) = json.loads((tmp_path / "records.json").read_text())["rows"].values()
    assert row["tokens_per_second"] == pytest.approx(2 * 64 / row["step_ms"] * 1000)
    assert row["ledger"]["ledger"] > row["ledger"]["parameters"] > 0
    assert row["losses"][-1] < row["losses"][0]
    (trial,) = json.loads((tmp_path / "trials.json").read_text())["trials"]
    assert Config(**flags_of_table(Config, trial["flags"], "")).model_size == "debug"
    page = (tmp_path / "records.md").read_text()
    assert f"| 1b, bf16 | {row['step_ms']:.1f} |" in page
    assert "all 1 rows are there" in records("^1b, bf16$")
    assert (tmp_path / "records.md").read_text() == page

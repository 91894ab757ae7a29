"""The command: its exit status, what it refuses, and that nothing runs on after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp2.options.errors import ConfigError
from migration.__main__ import main
from migration.prove import launch
from migration.prove.cli import divided
from migration.prove.flags import split
from migration.prove.launch import Failed, Program
from tests.harness import Ranks, python_environment
from tests.migrate.prove.in_pool import InPool
from tests.rewriter.test_scripts import OLD, SCRIPTS, moved

PAIR = Path(__file__).parent / "pair"


def prove(*words: object, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsdp2.migrate", "prove", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=python_environment())


def test_two_programs_from_the_command_line(tmp_path: Path) -> None:
    words = (PAIR / "before.py", PAIR / "after.py", "--steps", "2", "--json", "--keep", tmp_path / "kept", "--", "rate")
    ended = prove(*words)
    found = json.loads(ended.stdout)
    assert (ended.returncode, found["verdict"]) == (1, "different")
    said = [f"prove: runs {PAIR / name} on 2 ranks" for name in ("before.py", "after.py")]
    assert [line for line in ended.stderr.splitlines() if line.startswith("prove: runs")] == said
    assert found["first"]["name"] == "lr of group 0"
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["after", "before"]


def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    raise RuntimeError('no NVIDIA driver')\n")
    ended = prove(script, PAIR / "after.py")
    assert ended.returncode == 2
    *shown, last = ended.stderr.splitlines()
    assert last.startswith("fsdp2: error: prove:")
    assert "on 2 ranks: rank 1: exit status 1: RuntimeError: no NVIDIA driver" in last
    assert last.endswith("; --stand-in runs it with the CPU in a GPU's place")
    assert any("line 3, in <module>" in line for line in shown)


def test_no_rank_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.2)
    script, pid = tmp_path / "program.py", tmp_path / "pid"
    script.write_text(
        "import os, pathlib, time\n"
        "if os.environ['RANK'] == '0':\n"
        f"    while not os.path.exists({str(pid)!r}): time.sleep(0.1)\n"
        "else:\n"
        f"    pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    with pytest.raises(Failed, match="the others have ended, and rank 1 still runs"):
        Program(script, [], 2, 100).record(tmp_path / "record", steps=1)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_program_without_a_step(ranks: Ranks, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    # Without the barrier one rank may have ended before the other has connected to it.
    lines = ("import torch.distributed as dist", "dist.init_process_group()", "dist.barrier()")
    script.write_text("\n".join([*lines, "dist.destroy_process_group()", ""]))
    with pytest.raises(Failed, match="were recorded on these ranks only: none"):
        InPool(script, [], 2, 60, pool=ranks).record(tmp_path / "record", steps=1)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([__file__], "needs BEFORE and AFTER"),
        (["--against-one", __file__, __file__], "needs one program with --against-one"),
        ([__file__, "missing.py"], "there is no such file"),
        ([__file__, __file__, "--nproc", "0"], "--nproc"),
        (["--against-one", __file__, "--nproc", "1"], "--nproc"),
        ([__file__, __file__, "--stand-in", "--nproc", "4", "--devices-per-node", "3"], "a divisor of --nproc 4"),
        ([__file__, __file__, "--devices-per-node", "2"], "needs --stand-in"),
        ([__file__, __file__, "--keep", str(PAIR)], "exists; name a new folder"),
        (["--against-one", __file__, "--", "--batch-size", "{3}"], "isn't divisible by 2 ranks"),
    ],
)
def test_what_is_refused_at_once(words: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        main(["prove", *words])


def test_words_for_the_programs() -> None:
    assert split(["prove", "a.py", "--", "--steps", "--"]) == (["prove", "a.py"], ["--steps", "--"])
    assert split(["check", "--", "a.py"]) == (["check", "--", "a.py"], [])
    assert divided(["--batch-size={64}", "{8}", "{name}"], 4) == ["--batch-size=16", "2", "{name}"]


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="FSDP1 gathers to a CPU from torch 2.15 on")
def test_a_program_that_starts_its_ranks_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = next(script for script in SCRIPTS if script.name == "mnist.py")
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    ended = prove(script, moved(script, tmp_path), "--steps", "3")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("verdict: bit-equal\n")

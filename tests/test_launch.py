"""The program as a user starts it: torchrun, python -m, make, and ranks that fail. Signals: test_signals.py."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2.run.process import runtime
from fsdp2.run.process.group import process_group
from tests.harness import Ranks, main_in_ranks, of_kind, python_environment
from tests.programs import in_a_process

ROOT = Path(__file__).parent.parent
SMALL = ["--model-size=tiny", "--batch-size=16", "--device=cpu"]


_count = itertools.count()


class Started(subprocess.Popen[str]):
    """A program and all that it starts. torchrun puts each rank into a session of its own, so a mark in the
    environment tells what belongs to it."""

    def __init__(self, program: Sequence[str | Path], cwd: Path, environment: Mapping[str, str]) -> None:
        self.mark = f"STARTED_BY_TEST={os.getpid()}-{next(_count)}"
        super().__init__(
            [str(part) for part in program],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**python_environment(), **environment, **dict([self.mark.split("=")])},
            start_new_session=True,
        )

    def alive(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended, or is somebody else's
                if self.mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found


def start(program: Sequence[str | Path], cwd: Path, **environment: str) -> Started:
    return Started(program, cwd, environment)


def finish(process: Started, timeout: float = 150) -> tuple[int, str, str]:
    """Exit status, stdout and stderr; nothing of it is left running."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        while left := process.alive():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return process.returncode, out, err


def torchrun(n: int, *rest: str | Path) -> list[str | Path]:
    # Port 0: a free one, so that tests never meet.
    return ["torchrun", f"--nproc_per_node={n}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", *rest]


def metrics(run: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def wait_for_step(run: Path, process: Started, step: int = 3, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "metrics.jsonl").exists():
            lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
            if any(f'"kind": "train", "step": {step},' in line for line in lines):
                return
        time.sleep(0.05)
    pytest.fail(f"step {step} was not reached: {finish(process)}")


def test_the_main_job_in_one_process_then_infer(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "fsdp2.train", *SMALL, "--max-steps=4", "--tensorboard"]
    status, out, err = finish(start(line, tmp_path))
    assert status == 0, err
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("vit-")
    for part in (
        "model: vit tiny, 19,658 parameters",
        "sharding: FSDPVisionTransformer",
        f"run directory: runs/{run.name}",
        "test accuracy:",
        f"next: python -m fsdp2.infer runs/{run.name}",
    ):
        assert part in out
    assert [record["step"] for record in metrics(run, "train")] == [1, 2, 3, 4]
    assert {"loss", "lr", "grad_norm", "samples", "step_ms", "samples_per_second", "peak_memory_bytes", "epoch"} <= set(
        metrics(run, "train")[0]
    )
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert json.loads((run / "config.json").read_text())["flags"]["max-steps"] == 4

    status, out = in_a_process("-m fsdp2.infer", [str(run), "--json", "out.json"], tmp_path)
    assert status == 0, out
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["accuracy"] == metrics(run, "eval")[-1]["accuracy"]
    assert result["count"] == 360
    assert len(result["samples"]) == 10
    marks = [line[0] for line in out.splitlines() if line[:1] in "✓✗" and line]
    assert marks == ["✓" if sample["correct"] else "✗" for sample in result["samples"]]
    assert (run / "predictions.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_flag_under_torchrun_is_one_line_from_rank_zero(tmp_path: Path) -> None:
    status, _, err = finish(start(torchrun(2, "-m", "fsdp2.train", "--lr", "-1"), tmp_path))
    assert status == 1  # torchrun's own; the workers exit with 2
    said, *report = [line for line in err.splitlines() if "fsdp2: error: --lr -1: must be above 0" in line]
    assert said.startswith("fsdp2: error:")
    assert err.splitlines()[-2:-1] == report, "torchrun repeats it at the end of its own report"
    assert "exitcode  : 2" in err or "exitcode: 2" in err
    assert not (tmp_path / "runs").exists()


def test_a_wrong_flag_under_python_exits_with_two(tmp_path: Path) -> None:
    status, printed = in_a_process("-m fsdp2.train", ["--modle", "vit"], tmp_path)
    assert status == 2
    assert printed == "fsdp2: error: --modle: no such flag; did you mean --model?\n"


FAILING = textwrap.dedent("""
    import sys
    import torch.distributed as dist
    from fsdp2.run.process import ending, runtime
    from fsdp2.config import parse
    from fsdp2.train import main

    def on_event(kind, data):
        if kind == "train" and data["step"] == 3 and dist.get_rank() == 1:
            {action}

    with ending.exit_status():
        main(parse(sys.argv[1:]), on_event)
""")


FAILURES = {
    "raises": 'raise ValueError("rank one has had enough")',
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("action", FAILURES.values(), ids=FAILURES.keys())
def test_a_rank_that_fails_ends_the_job_and_the_next_resumes(ranks: Ranks, tmp_path: Path, action: str) -> None:
    script, run = tmp_path / "failing.py", tmp_path / "run"
    script.write_text(FAILING.format(action=action))
    flags = [*SMALL, f"--run-dir={run}", "--checkpoint-every=2", "--max-steps=6"]
    process = start(torchrun(2, script, *flags), tmp_path)
    wait_for_step(run, process, step=2)
    began = time.monotonic()
    status, _, err = finish(process)
    assert status == 1
    assert time.monotonic() - began < 25, "torchrun would have waited 30 s for a rank that hangs"
    if "raise" in action:
        assert f"fsdp2: stopped: rank 1 on {socket.gethostname()}: ValueError: rank one has had enough\n" in err
        assert "Traceback" in err
    assert "rank 0 stopped because another rank ended or was killed; its traceback, or the signal that torchrun" in err
    if "kill" in action:
        assert "exitcode  : -9" in err, "as the line says"
    assert metrics(run, "end") == []
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000002"], "nothing was saved after"
    assert metrics(run, "failure")[-1]["rank"] == 0

    # The same flags in other processes go on from step 2; the file has each step once.
    events = ranks.run(main_in_ranks, flags)[0]
    assert of_kind(events, "resume")[0]["step"] == 2
    assert [record["step"] for record in metrics(run, "train")] == [1, 2, 3, 4, 5, 6]


def make(*words: str, cwd: Path = ROOT, timeout: float = 200) -> tuple[int, str, str]:
    """make with this environment instead of one that it would create."""
    venv = Path(sys.executable).parent.parent
    stamps = [f"-o{venv}/{name}" for name in (".installed", ".dev")]
    return finish(start(["make", "-f", ROOT / "Makefile", *stamps, f"VENV={venv}", *words], cwd), timeout)


def test_make_train_resume_and_infer(tmp_path: Path) -> None:
    flags = " ".join(SMALL)
    status, out, err = make("train", f"ARGS={flags} --max-steps=3", cwd=tmp_path)
    assert status == 0, err
    assert "strategy: fsdp2 on 2 ranks" in out
    status, out, err = make("resume", "NPROC=1", "ARGS=--max-steps=5", cwd=tmp_path)
    assert status == 0, err
    assert "strategy: fsdp2 on 1 rank," in out
    assert "at step 3" in out
    (run,) = (tmp_path / "runs").iterdir()
    assert [record["step"] for record in metrics(run, "train")] == [1, 2, 3, 4, 5]
    (tmp_path / "runs" / "minimal").mkdir()  # newer, and what fsdp2.minimal leaves, which is no run of fsdp2.train
    status, out, err = make("infer", cwd=tmp_path)
    assert status == 0, err
    assert "of 10 samples right" in out


def test_a_folder_that_is_no_run_is_not_taken_for_the_newest(tmp_path: Path) -> None:
    (tmp_path / "runs" / "minimal").mkdir(parents=True)
    for target in ("resume", "infer"):
        status, out, err = make(target, cwd=tmp_path)
        assert status != 0
        assert "runs/minimal" not in out + err
        assert "no run" in out + err


def test_make_test_runs_tox_and_help_lists_every_target() -> None:
    status, out, _ = make("-n", "test", "ARGS=-k nothing")
    assert status == 0
    assert "tox run --current-env -e newest -- --ignore=tests/migrate " in out
    assert out.rstrip().endswith('-m "not slow and not ray and not thorough" -k nothing')
    status, out, _ = make("help")
    assert status == 0
    text = (ROOT / "Makefile").read_text()
    targets = {
        line.split(":")[0] for line in text.splitlines() if line[:1].isalpha() and ":" in line and "=" not in line
    }
    listed = {line.split()[1] for line in out.splitlines() if line.startswith("  make ")}
    assert targets - {"ray-train-%", "ray-zero%"} <= listed
    assert "Each train-… also as ray-train-…" in out
    assert {"train", "resume", "infer", "test", "test-oldest", "lint", "clean", "train-all", "train-hsdp"} <= listed


@pytest.mark.parametrize("run", ["runs/a", "runs/a/", "s3://bucket/run"])
def test_make_resume_and_infer_take_a_folder_or_a_url(run: str) -> None:
    place = run.rstrip("/")
    _, out, _ = make("-n", "resume", f"RUN={run}")
    assert f'--config "{place}/config.json" --run-dir "{place}"' in out
    assert f'-m fsdp2.infer "{place}"' in make("-n", "infer", f"RUN={run}")[1]


def test_a_signal_to_make_is_one_to_torchrun(tmp_path: Path) -> None:
    """A shell between them would die of it and leave the run behind."""
    (tmp_path / "bin").mkdir()
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text('#!/bin/bash\ntrap "touch asked; exit 1" TERM\ntouch began\nwhile :; do sleep 0.05; done\n')
    torchrun.chmod(0o755)
    command = ["make", "-f", str(ROOT / "Makefile"), f"VENV={tmp_path}", f"-o{tmp_path}/.installed", "train"]
    with subprocess.Popen(command, cwd=tmp_path, env=python_environment()) as process:
        until = time.monotonic() + 30
        while not (tmp_path / "began").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) != 0
    assert (tmp_path / "asked").exists()


def test_each_variant_is_there_through_ray() -> None:
    status, out, _ = make("-n", "ray-train-hsdp", "ARGS=--epochs 3")
    assert status == 0
    assert "-m launchers.ray_train --num-workers 4 --replicas 2 --epochs 3" in out


def test_make_without_a_run_says_so(tmp_path: Path) -> None:
    status, out, _ = make("infer", cwd=tmp_path)
    assert status != 0
    assert "there is no run yet: make train" in out


def test_a_process_alone_may_begin_again_after_an_error() -> None:
    world = runtime.World(rank=0, world_size=1, local_rank=0, local_world_size=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="in the run"), process_group(world, torch.device("cpu")):
            raise ValueError("in the run")
    assert not dist.is_initialized()

"""What the launchers' files say to each other and to torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig

FOLDER = Path(__file__).parents[2] / "launchers"
VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def seconds(file: str, pattern: str) -> int:
    (found,) = re.findall(pattern, (FOLDER / file).read_text())
    return int(found)


def test_torchrun_waits_as_long_as_the_scripts_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """From SIGTERM on, and less than what sent it waits."""
    said = {
        file: seconds(file, rf"export {VARIABLE}=\$\{{{VARIABLE}:-(\d+)\}}") for file in ("slurm.sbatch", "torchrun.sh")
    }
    assert 90 < said["slurm.sbatch"] < seconds("slurm.sbatch", r"--signal=B:USR1@(\d+)")
    assert 90 < said["torchrun.sh"] < seconds("kubernetes.yaml", r"terminationGracePeriodSeconds: (\d+)")
    monkeypatch.setenv(VARIABLE, "110")
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)
    if not hasattr(config, "shutdown_timeout"):
        pytest.skip("this torch waits for 30 s whatever it is told")
    assert config.shutdown_timeout == 110


@pytest.mark.parametrize(("flags", "queued"), [("--checkpoint-every=never", False), ("--checkpoint-every 9", True)])
def test_a_job_with_nothing_to_go_on_from_is_not_queued_again(tmp_path: Path, flags: str, queued: bool) -> None:
    """SLURM's programs are stand-ins: srun says that it runs, and ends when scancel is called."""
    over, asked = tmp_path / "over", tmp_path / "asked"
    for name, body in (
        ("srun", f"echo running; while [[ ! -e {over} ]]; do sleep 0.05; done; exit 1"),
        ("scancel", f"touch {over}"),
        ("scontrol", f"touch {asked}"),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_NNODES": "1"}
    script = ["bash", str(FOLDER / "slurm.sbatch"), *flags.split()]
    with subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "running\n"
        job.send_signal(signal.SIGUSR1)
        out, err = job.communicate(timeout=60)
    assert (job.returncode, asked.exists()) == ((0, True) if queued else (1, False)), (out, err)
    assert ("goes on from its newest checkpoint" in out) == queued
    assert ("isn't queued again" in err) == (not queued)

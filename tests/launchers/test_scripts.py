"""What the launchers' files say to each other and to torchrun."""

from __future__ import annotations

import re
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

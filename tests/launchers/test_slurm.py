"""The scripts for SLURM: with a stand-in for srun, and under a real SLURM of two nodes where it is installed."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import python_environment
from tests.test_launch import ROOT, SMALL, finish, metrics, start

SCRIPTS = ("slurm.sbatch", "slurm_tasks.sbatch")

# Two nodes of one task each, as srun starts them; the variables that are the same for all come from the job.
SRUN = """\
#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=0 "$@" & done
status=0
for task in 0 1; do wait -n || status=1; done
exit $status
"""


def world_size(run: Path) -> int:
    found: int = json.loads((run / "config.json").read_text())["environment"]["world_size"]
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_starts_one_run_on_two_nodes(tmp_path: Path, script: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{python_environment()['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "RANKS_PER_NODE": "1",
    }
    command = ["bash", str(ROOT / "launchers" / script), *SMALL, "--run-dir=a run", "--max-steps=3", "--no-save-model"]
    status, _, err = finish(start(command, tmp_path, **environment))
    assert status == 0, err
    run = tmp_path / "a run"
    assert world_size(run) == 2
    assert [record["step"] for record in metrics(run, "train")] == [1, 2, 3]


def test_options_of_sbatch_stand_before_the_first_command() -> None:
    """sbatch ignores those that come later."""
    for script in SCRIPTS:
        lines = (ROOT / "launchers" / script).read_text().splitlines()
        begin = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
        options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
        assert len(options) > 5
        assert max(options) < begin


CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a SLURM whose controller and two nodes are processes of this machine."""
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
        pytest.skip("needs SLURM: apt-get install slurm-wlm")
    folder = tmp_path / "slurm"
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir(parents=True)
    file = folder / "slurm.conf"
    file.write_text(
        CONFIGURATION.format(
            host=socket.gethostname().split(".")[0], user=getpass.getuser(), folder=folder, ports=free_ports(3)
        )
    )
    environment = {**python_environment(), "SLURM_CONF": str(file)}
    daemons = [
        subprocess.Popen([*command, "-D"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in (["slurmctld"], ["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"])
    ]
    try:
        deadline = time.monotonic() + 30
        while _slurm(["sinfo", "-h", "-t", "idle", "-o", "%D"], environment) != "2":
            assert time.monotonic() < deadline, (folder / "ctld.log").read_text()
            time.sleep(0.2)
        yield environment
        _slurm(["scancel", "--user", getpass.getuser()], environment)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def _slurm(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    return (done.stdout + done.stderr).strip()


def _ended(job: str, environment: dict[str, str]) -> str:
    """The state in which a job has ended."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        shown = _slurm(["scontrol", "show", "job", job], environment)
        state = shown.partition("JobState=")[2].split()[0]
        if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            return state
        time.sleep(0.5)
    pytest.fail(shown)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_job_saves_on_sigterm_and_goes_on_when_it_is_submitted_again(
    tmp_path: Path, slurm: dict[str, str], script: str
) -> None:
    run, log = tmp_path / "run", tmp_path / "job.log"
    here = ["--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-task=1", "--time=5", "--no-requeue"]
    flags = [*SMALL, f"--run-dir={run}", "--checkpoint-every=100000"]
    command = ["sbatch", "--parsable", *here, f"--output={log}", str(ROOT / "launchers" / script), *flags]
    slurm["RANKS_PER_NODE"] = "1"

    job = _slurm([*command, "--epochs=100000"], slurm)
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or not metrics(run, "train"):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    _slurm(["scancel", "--signal=TERM", job], slurm)  # what --signal=TERM@120 does
    _ended(job, slurm)
    (end,) = metrics(run, "end")
    assert end["reason"] == "SIGTERM"
    assert (run / "checkpoints" / f"step-{end['step']:08d}" / "COMMIT.json").exists()
    assert world_size(run) == 2

    again = _slurm([*command, f"--max-steps={end['step'] + 2}"], slurm)
    assert _ended(again, slurm) == "COMPLETED", log.read_text()
    assert metrics(run, "end")[-1]["reason"] == "finished"
    assert f"at step {end['step']}, epoch" in log.read_text()

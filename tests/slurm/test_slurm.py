"""The script for SLURM: with a stand-in for srun, and under a real SLURM of two nodes where it is installed."""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Ranks, losses, main_in_ranks, python_environment, small
from tests.test_launch import ROOT, SMALL, finish, metrics, start

SCRIPT = ROOT / "launchers" / "slurm.sbatch"
TASKS_PER_NODE = pytest.mark.parametrize("tasks", [1, 2], ids=["torchrun on each node", "a task for each rank"])

# The tasks of a job as srun starts them; the variables that are the same for all come from the job.
SRUN = """\
#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$((task % SLURM_NTASKS_PER_NODE)) "$@" & done
status=0
for task in 0 1; do wait -n || status=1; done
exit $status
"""


def world_size(run: Path) -> int:
    found: int = json.loads((run / "config.json").read_text())["environment"]["world_size"]
    return found


@TASKS_PER_NODE
def test_the_script_starts_one_run_of_all_tasks(tmp_path: Path, tasks: int) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{python_environment()['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NODEID": "0",
        "SLURM_NNODES": str(2 // tasks),
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "RANKS_PER_NODE": "1",
    }
    command = ["bash", str(SCRIPT), *SMALL, "--run-dir=a run", "--max-steps=3", "--no-save-model"]
    status, out, err = finish(start(command, tmp_path, **environment))
    assert status == 0, err
    run = tmp_path / "a run"
    assert world_size(run) == 2
    assert [record["step"] for record in metrics(run, "train")] == [1, 2, 3]
    assert "next: python -m fsdp2.checkpoint export 'a run' model.pt --format pt" in out


def test_options_of_sbatch_stand_before_the_first_command() -> None:
    """sbatch ignores those that come later."""
    lines = SCRIPT.read_text().splitlines()
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
AuthInfo=cred_expire=5
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
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=first Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=2
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
        pytest.skip("needs SLURM: sh tests/slurm/install.sh")
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


def _ended(job: str, environment: dict[str, str]) -> tuple[str, int]:
    """The state in which a job has ended, and how often it was started again."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        shown = _slurm(["scontrol", "show", "job", job], environment)
        state, restarts = (shown.partition(f"{name}=")[2].split()[0] for name in ("JobState", "Restarts"))
        if state not in ("PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "COMPLETING", "REQUEUED"):
            return state, int(restarts)
        time.sleep(0.3)
    pytest.fail(shown)


def _submit(slurm: dict[str, str], log: Path, tasks: int, *flags: str, nodes: str = "2") -> str:
    """The number of a job on two nodes without GPUs."""
    here = ["--gpus-per-node=0", f"--nodes={nodes}", "--cpus-per-task=1", "--time=5", f"--output={log}"]
    here += [f"--ntasks-per-node={tasks}"] if tasks > 1 else []
    return _slurm(["sbatch", "--parsable", *here, str(SCRIPT), *flags], {**slurm, "RANKS_PER_NODE": "1"})


def _until_step(run: Path, step: int, log: Path) -> None:
    deadline = time.monotonic() + 120
    while (
        not (run / "metrics.jsonl").exists()
        or f'"kind": "train", "step": {step},' not in (run / "metrics.jsonl").read_text()
    ):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@pytest.mark.slow
@TASKS_PER_NODE
def test_a_job_whose_time_is_over_is_queued_again_and_goes_on_bit_for_bit(
    ranks: Ranks, tmp_path: Path, slurm: dict[str, str], tasks: int
) -> None:
    run, log = tmp_path / "run", tmp_path / "job.log"
    flags = ["--checkpoint-every=100000", "--max-steps=500", "--no-save-model"]
    job = _submit(slurm, log, tasks, *small(run, *flags))
    _until_step(run, 3, log)
    _slurm(["scancel", "--batch", "--signal=USR1", job], slurm)  # what --signal=B:USR1@120 does
    state, restarts = _ended(job, slurm)
    assert (state, restarts) == ("COMPLETED", 1), log.read_text()
    (end,), (resumed,) = metrics(run, "end"), metrics(run, "resume")
    assert end["reason"] == "finished"
    assert 3 <= resumed["step"] < 500
    assert f"SIGUSR1: saved at step {resumed['step']} after" in log.read_text()
    assert "SignalException" not in log.read_text()  # as torchrun ends after a SIGTERM
    assert f"job {job} is in the queue again and goes on from its newest checkpoint" in log.read_text()

    assert world_size(run) == 2 * tasks
    whole = ranks.run(main_in_ranks, small(tmp_path / "whole", *flags), ranks=2 * tasks)[0]
    assert [record["loss"] for record in metrics(run, "train")] == losses(whole)


@pytest.mark.slow
@TASKS_PER_NODE
def test_a_job_whose_time_is_over_while_its_ranks_start_saves_all_the_same(
    tmp_path: Path, slurm: dict[str, str], tasks: int
) -> None:
    run, log = tmp_path / "run", tmp_path / "job.log"
    flags = small(run, "--checkpoint-every=100000", "--max-steps=3000", "--no-save-model")
    job = _submit(slurm, log, tasks, *flags)
    while not log.exists() or f"fsdp2: job {job}, start 1, on" not in log.read_text():
        time.sleep(0.1)
    for _ in range(2):  # the first before a rank can hear, the second while the script asks them already
        time.sleep(1)
        _slurm(["scancel", "--batch", "--signal=USR1", job], slurm)
    while not (run / "metrics.jsonl").exists() or not metrics(run, "resume"):
        assert _slurm(["squeue", "-h", "-j", job, "-o", "%T"], slurm), log.read_text()
        time.sleep(0.3)
    (resumed,) = metrics(run, "resume")
    assert resumed["step"] < 1000, "nobody was asked before the time was really over"
    # Ranks may hear of it at different steps, and the first names the reason.
    assert re.search(rf"SIGUSR1(, on another node)?: saved at step {resumed['step']} after", log.read_text())
    assert log.read_text().count("is in the queue again and goes on from its newest checkpoint") == 1


@pytest.mark.slow
@TASKS_PER_NODE
def test_a_preempted_job_saves_in_its_grace_and_is_queued_again(
    tmp_path: Path, slurm: dict[str, str], tasks: int
) -> None:
    run, log = tmp_path / "run", tmp_path / "job.log"
    job = _submit(slurm, log, tasks, *small(run, "--checkpoint-every=100000", "--max-steps=500", "--no-save-model"))
    _until_step(run, 1, log)
    _slurm(["sbatch", "--partition=first", "--nodes=2", "--exclusive", "--wrap=sleep 1", "--output=/dev/null"], slurm)
    assert _ended(job, slurm) == ("COMPLETED", 1), log.read_text()
    (resumed,) = metrics(run, "resume")
    assert f"SIGTERM: saved at step {resumed['step']} after" in log.read_text()
    assert f"fsdp2: preempted; job {job} is in the queue again" in log.read_text()
    assert re.search(rf"^fsdp2: job {job}, start 2, on n\[1-2\], 20", log.read_text(), re.MULTILINE)


@pytest.mark.slow
def test_a_job_of_a_range_of_nodes_goes_on_with_those_that_are_left(tmp_path: Path, slurm: dict[str, str]) -> None:
    run, log = tmp_path / "run", tmp_path / "job.log"
    flags = small(run, "--checkpoint-every=5", "--max-steps=300", "--no-save-model", "--global-batch-size=8")
    job = _submit(slurm, log, 1, *flags, nodes="1-2")
    _until_step(run, 7, log)
    _slurm(["scontrol", "update", "nodename=n2", "state=down", "reason=test"], slurm)  # as after SlurmdTimeout
    assert _ended(job, slurm) == ("COMPLETED", 1), log.read_text()
    starts = re.findall(rf"^fsdp2: job {job}, start \d, on (\S+),", log.read_text(), re.MULTILINE)
    assert starts == ["n[1-2]", "n1"]
    (resumed,) = metrics(run, "resume")
    assert resumed["step"] >= 5
    assert [record["step"] for record in metrics(run, "train")] == list(range(1, 301))


@pytest.mark.slow
def test_a_job_without_an_environment_begins_with_the_lines_of_its_copy(tmp_path: Path, slurm: dict[str, str]) -> None:
    run, log, copy = tmp_path / "run", tmp_path / "job.log", tmp_path / "copy.sbatch"
    lines = [f"export {name}={shlex.quote(slurm[name])}" for name in ("PATH", "SLURM_CONF")]
    lines += ["export RANKS_PER_NODE=1 OMP_NUM_THREADS=1", f"cd {shlex.quote(str(ROOT))}"]
    copy.write_text(SCRIPT.read_text().replace("\nset -euo", "\n" + "\n".join([*lines, "set -euo"])))
    options = ["--export=NONE", "--gpus-per-node=0", "--cpus-per-task=1", "--time=5", f"--output={log}"]
    flags = small(run, "--max-steps=3", "--no-save-model")
    job = _slurm(["sbatch", "--parsable", *options, str(copy), *flags], slurm)
    assert _ended(job, slurm) == ("COMPLETED", 0), log.read_text()
    assert world_size(run) == 2


@pytest.mark.slow
def test_a_job_counts_its_own_tasks(tmp_path: Path, slurm: dict[str, str]) -> None:
    """Whatever the shell says that it was submitted from, or `--ntasks`."""
    run, log = tmp_path / "run", tmp_path / "job.log"
    flags = small(run, "--max-steps=3", "--no-save-model")
    options = ["--nodes=2", "--ntasks=4", "--overcommit", "--gpus-per-node=0", "--cpus-per-task=1", f"--output={log}"]
    another = {**slurm, "RANKS_PER_NODE": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NTASKS": "1"}
    job = _slurm(["sbatch", "--parsable", *options, str(SCRIPT), *flags], another)
    assert _ended(job, slurm) == ("COMPLETED", 0), log.read_text()
    assert world_size(run) == 2


@pytest.mark.slow
def test_a_job_that_is_asked_to_end_saves_and_is_not_queued_again(tmp_path: Path, slurm: dict[str, str]) -> None:
    run, log = tmp_path / "run", tmp_path / "job.log"
    flags = small(run, "--checkpoint-every=100000")
    job = _submit({**slurm, "RETRIES": "3"}, log, 1, *flags, "--epochs=100000")
    _until_step(run, 1, log)
    _slurm(["scancel", "--signal=USR1", job], slurm)
    assert _ended(job, slurm) == ("COMPLETED", 0), log.read_text()
    (end,) = metrics(run, "end")
    assert end["reason"] == "SIGUSR1"
    assert (run / "checkpoints" / f"step-{end['step']:08d}" / "COMMIT.json").exists()

    again = _submit(slurm, log, 1, *flags, f"--max-steps={end['step'] + 2}")
    assert _ended(again, slurm) == ("COMPLETED", 0), log.read_text()
    assert metrics(run, "end")[-1]["reason"] == "finished"
    assert f"at step {end['step']}, epoch" in log.read_text()

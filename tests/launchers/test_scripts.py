"""What the launchers' files say to each other and to torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

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


SRUN = """\
if [[ ${@: -1} == hostname ]]; then echo first; exit; fi
printf '%s|' "$@" MASTER_ADDR=$MASTER_ADDR CPUS=${SRUN_CPUS_PER_TASK:-} GLOO=${GLOO_SOCKET_IFNAME:-}; echo
while [[ ! -e $OVER ]]; do sleep 0.05; done
[[ -z ${PREEMPTED:-} ]] || touch "$PREEMPTED"
[[ -z $SAVES || ( -e $SAVES/COMMIT.json && ! ${AGAIN:-} ) ]] || { mkdir -p "$SAVES"; touch "$SAVES/COMMIT.json"; }
exit "${STATUS:-1}"
"""


class Job:
    """A job whose SLURM is a stand-in: srun says what it is asked for, and ends when scancel is called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.over, self.asked = folder, folder / "over", folder / "asked"
        self.preempted = folder / "preempted"
        show = f"if [[ -e {self.preempted} ]]; then echo PreemptTime=2026-11-30T11:09:17; fi"
        asked = f'if [[ $1 == show ]]; then {show}; else echo "$@" > {self.asked}; fi'
        told = {"scancel": f'echo "$@" >> {self.over}', "scontrol": asked, "torchrun": "exit 1"}
        for name, body in {"srun": SRUN, **told}.items():
            (folder / name).write_text(f"#!/bin/bash\n{body}\n")
            (folder / name).chmod(0o755)

    def run(
        self, *flags: str, saves: str = "", ends: bool = False, terminal: int = subprocess.DEVNULL, **variables: Any
    ) -> tuple[int, str, str]:
        """Its status and what it prints. `saves`: the checkpoint that it leaves. `ends`: by itself, before its time."""
        given = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "OVER": str(self.over), "SAVES": saves}
        for left in (self.over, self.asked, self.preempted):
            left.unlink(missing_ok=True)
        if ends:
            self.over.touch()
        environment = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", **given, **variables}
        script = ["bash", str(FOLDER / "slurm.sbatch"), *flags]
        with subprocess.Popen(
            script,
            env=environment,
            cwd=self.folder,
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # a buffer would keep lines behind the first, which `communicate` doesn't see
        ) as job:
            assert job.stdout is not None
            first = job.stdout.readline()
            if first and not ends:
                job.send_signal(signal.SIGUSR1)
            out, err = job.communicate(timeout=60)
        return job.returncode, (first + out).decode(), err.decode()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_job_whose_time_is_over_is_queued_again_if_it_has_got_on(job: Job, tmp_path: Path) -> None:
    new = str(tmp_path / "a run" / "checkpoints" / "step-00000002")
    status, out, _ = job.run("--run-dir", "a run", saves=new)
    assert (status, job.asked.exists()) == (0, True)
    assert "the time is over; job 1 is in the queue again and goes on from its newest checkpoint" in out
    status, _, err = job.run("--run-dir=a run", saves=new)  # what was there before
    assert (status, job.asked.exists()) == (1, False)
    assert "no checkpoint in a run (its COMMIT.json) is newer than this start of the job" in err
    assert job.run("--run-dir=s3://bucket/run")[0] == 0, "a bucket isn't looked into"
    assert job.run("--run-dir=s3://bucket/run", "--checkpoint-every", "never")[0] == 1


@pytest.mark.parametrize(
    ("retries", "restarts", "saves", "queued"),
    [("", "0", True, False), ("2", "0", True, True), ("2", "2", True, False), ("2", "0", False, False)],
)
def test_a_job_that_fails_is_queued_again_as_often_as_asked_for(
    job: Job, tmp_path: Path, retries: str, restarts: str, saves: bool, queued: bool
) -> None:
    new = str(tmp_path / "run" / "checkpoints" / "step-00000002") if saves else ""
    asked: dict[str, Any] = {"RETRIES": retries, "SLURM_RESTART_COUNT": restarts, "STATUS": "3"}
    status, out, err = job.run("--run-dir=run", saves=new, ends=True, **asked)
    assert job.asked.exists() == queued, (out, err)
    assert status == (0 if queued else 1 if retries == "2" and restarts == "0" else 3)
    assert ("it was queued again 2 times, and RETRIES is 2" in err) == (restarts == "2")


def test_who_is_asked_to_end_is_not_queued_again(job: Job, tmp_path: Path) -> None:
    new = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert job.run("--run-dir=run", saves=new, ends=True, RETRIES="3", STATUS="143")[0] == 143  # scancel --signal=TERM
    (tmp_path / "run" / "metrics.jsonl").write_text('{"kind": "end", "step": 9, "reason": "SIGTERM", "seconds": 1}\n')
    assert job.run("--run-dir=run", saves=f"{new}1", ends=True, RETRIES="3", STATUS="1")[0] == 1  # torchrun's
    assert not job.asked.exists()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"kind": "train", "step": 9}\n')  # srun kills others by SIGTERM
    assert job.run("--run-dir=run", saves=f"{new}2", ends=True, RETRIES="3", STATUS="143")[0] == 0
    job.asked.unlink()
    ours, theirs = os.openpty()  # in the shell of salloc
    status, out, err = job.run("--run-dir=run", saves=f"{new}0", ends=True, terminal=theirs, RETRIES="3", STATUS="3")
    for end in (ours, theirs):
        os.close(end)
    assert (status, job.asked.exists()) == (3, False), (out, err)


@pytest.mark.parametrize(
    ("status", "reason", "queued"),
    [("1", "SIGTERM", True), ("0", "SIGTERM", True), ("1", None, True), ("0", "finished", False), ("0", None, False)],
)
def test_a_preempted_job_is_queued_again_unless_it_was_done(
    job: Job, tmp_path: Path, status: str, reason: str | None, queued: bool
) -> None:
    """Without a new checkpoint too, as SLURM does it. A task for each rank ends with 0 after it has saved."""
    (tmp_path / "run").mkdir()
    if reason is not None:
        (tmp_path / "run" / "metrics.jsonl").write_text(f'{{"kind": "end", "step": 3, "reason": "{reason}"}}\n')
    preempted = str(job.preempted)
    ended, out, err = job.run("--run-dir=run", ends=True, STATUS=status, PREEMPTED=preempted)
    assert (ended, job.asked.exists()) == (0, queued), (out, err)
    assert ("fsdp2: preempted; job 1 is in the queue again" in out) == queued


def test_the_shell_of_a_step_is_refused_and_a_job_from_there_is_not(job: Job, tmp_path: Path) -> None:
    """`srun --pty bash` holds the nodes, so that a further step would wait for ever."""
    ours, theirs = os.openpty()
    status, _, err = job.run("--run-dir=run", ends=True, terminal=theirs, SLURM_STEP_ID="0")
    assert (status, "which holds the nodes of its job; begin with salloc instead" in err) == (2, True)
    assert job.run("--run-dir=run", ends=True, terminal=theirs, SLURM_STEP_ID="4294967290", STATUS="0")[0] == 0
    for end in (ours, theirs):
        os.close(end)
    assert job.run("--run-dir=run", ends=True, STATUS="0", SLURM_STEP_ID="0")[0] == 0


def test_a_program_of_ones_own_chooses_its_signal(job: Job, tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/bash\n{SRUN.replace('exit', 'sleep 6; exit')}\n")
    own: dict[str, Any] = {"PROGRAM": "mine.py", "RUN": "own", "SIGNAL": "USR1"}
    job.run("OUT", saves=str(tmp_path / "own" / "checkpoints" / "a"), **own)
    assert job.over.read_text() == "--signal=USR1 1\n", "it may save at each, and is asked once"
    job.run("--run-dir=run", saves=str(tmp_path / "run" / "checkpoints" / "a"))
    assert job.over.read_text() == "--signal=USR1 1\n" * 2, "a rank that starts ignores the first"


def test_of_an_array_one_task_is_asked_to_end_and_queued_again(job: Job, tmp_path: Path) -> None:
    """The last task has the number of the whole array, which SLURM takes for all of its tasks."""
    task: dict[str, Any] = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    assert job.run("--run-dir=run", saves=str(tmp_path / "run" / "checkpoints" / "step-00000002"), **task)[0] == 0
    assert job.over.read_text() == "--signal=USR1 7_1\n"
    assert job.asked.read_text() == "requeue 7_1\n"


def test_another_program_says_where_its_checkpoints_are(job: Job, tmp_path: Path) -> None:
    new = str(tmp_path / "OUT" / "checkpoints" / "step-00000002")
    status, _, err = job.run("OUT", saves=new, PROGRAM="mine.py")
    assert (status, job.asked.exists()) == (1, False)
    assert "it isn't queued again, since nothing says where its checkpoints are; give RUN=DIR" in err
    assert job.run("OUT", saves=f"{new}0", PROGRAM="mine.py", RUN="%a", SLURM_ARRAY_TASK_ID="OUT")[0] == 0
    assert job.asked.exists()
    assert job.run("--model=vit", RUN="OUT")[0] == 2, "fsdp2.train has its --run-dir"


@pytest.mark.parametrize(("name", "given"), [(".metadata", {}), ("last.pt", {"CHECKPOINTS": "*.pt"})])
def test_checkpoints_in_other_forms_count_for_another_program(
    job: Job, tmp_path: Path, name: str, given: dict[str, str]
) -> None:
    """`torch.distributed.checkpoint` writes .metadata last. A program may write over its last checkpoint."""
    own: dict[str, Any] = {"PROGRAM": "mine.py", "RUN": "own", **given}
    (tmp_path / "srun").write_text(f"#!/bin/bash\n{SRUN.replace('COMMIT.json', name)}\n")
    for step, again, queued in (("1", "", True), ("1", "", False), ("1", "yes", True), ("2", "", True)):
        status, _, err = job.run(saves=str(tmp_path / "own" / f"step{step}"), AGAIN=again, **own)
        assert (status, job.asked.exists()) == (0 if queued else 1, queued), err
        assert job.over.read_text() == "--signal=TERM 1\n"
    counted = f"(its COMMIT.json, or {given.get('CHECKPOINTS', '.metadata')}; other files count by CHECKPOINTS='*.pt')"
    assert f"no checkpoint in own {counted} is newer" in job.run(**own)[2]


def test_checkpoints_behind_a_link_count(job: Job, tmp_path: Path) -> None:
    """docs/checkpoints.md: the folder may be one, to a larger disk."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk" / "checkpoints")
    assert job.run("--run-dir=run", saves=str(tmp_path / "disk" / "checkpoints" / "step-00000002"))[0] == 0
    assert job.asked.exists()


def test_a_run_that_is_finished_as_its_time_is_over_is_a_success(job: Job, tmp_path: Path) -> None:
    new = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    (tmp_path / "run").mkdir()
    for reason, queued in (("finished", False), ("already finished", False), ("SIGTERM", True)):
        line = {"kind": "end", "step": 9, "reason": reason, "seconds": 1}
        (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        assert (job.run("--run-dir=run", saves=f"{new}{queued}")[0], job.asked.exists()) == (0, queued)


def test_where_a_run_began_is_for_its_first_start(job: Job, tmp_path: Path) -> None:
    flags = ("--run-dir=run", "--resume=elsewhere/step-00000009")
    assert "--resume=auto" not in job.run(*flags, SLURM_RESTART_COUNT="1")[1]
    (tmp_path / "run" / "checkpoints" / "step-00000012").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-00000012" / "COMMIT.json").touch()
    assert "--resume=auto" not in job.run(*flags)[1]
    assert (
        "|--resume=elsewhere/step-00000009|--resume=auto|--no-resume-partial|"
        in job.run(*flags, SLURM_RESTART_COUNT="1")[1]
    )


def test_what_a_job_is_given_by_the_environment(job: Job) -> None:
    _, out, _ = job.run("--run-dir=runs/a-%a", "--seed", "%a", SLURM_ARRAY_TASK_ID="7", SLURM_CPUS_PER_TASK="8")
    assert "|-m|fsdp2.train|--run-dir=runs/a-7|--seed|7|" in out
    assert "|CPUS=8|GLOO=|" in out
    _, out, _ = job.run("OUT", PROGRAM="examples/dpo.py DIR", CONTAINER="apptainer exec --nv IMAGE", INTERFACE="eth1")
    assert out.partition("\n")[2].startswith(
        "--kill-on-bad-exit=1|--ntasks=1|--ntasks-per-node=1|apptainer|exec|--nv|IMAGE|bash|-c|"
    )
    assert "|examples/dpo.py|DIR|OUT|" in out
    assert "|CPUS=|GLOO=eth1|" in out
    assert "|MASTER_ADDR=first|" in job.run("--run-dir=run", SLURM_NODEID="")[1], "salloc's shell is elsewhere"


@pytest.mark.parametrize(
    ("flags", "variables", "line"),
    [
        (["--model=vit"], {}, "no --run-dir: give one that all nodes see"),
        (["--run-dir=run"], {"SLURM_GPUS_PER_NODE": "0"}, "the job has no GPUs; RANKS_PER_NODE=2 in front of sbatch"),
        (["--run-dir=run"], {"SLURM_JOB_ID": ""}, "there is no job of SLURM here; give sbatch in front"),
        (["--run-dir=run"], {"PATH": "/usr/bin:/bin"}, f"{socket.gethostname()} has no torchrun; activate your"),
    ],
)
def test_what_a_job_needs(job: Job, flags: list[str], variables: dict[str, Any], line: str) -> None:
    status, out, err = job.run(*flags, **variables)
    assert (status, out) == (2, "")
    assert f"slurm.sbatch: error: {line}" in err

"""Which signal to whom does what: each row of the table in docs/notes/signals.md, done for real."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp2.run.process import ending, signals
from fsdp2.run.process.ending import lost_peer
from fsdp2.run.process.runtime import World, store_gone
from tests.harness import python_environment
from tests.test_launch import ROOT, SMALL, Started, finish, metrics, start, torchrun, wait_for_step

LINES = [line for line in (ROOT / "docs/notes/signals.md").read_text().splitlines() if line.startswith("| SIG")]
TABLE = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in LINES]

TORCHRUN, GROUP, ONE_RANK = "torchrun", "torchrun's process group (Ctrl-C)", "one rank"
ONE_NODE, ALONE = "torchrun of one of two nodes", "the process, without torchrun"
LOADING = "torchrun, with `--loader-workers 1`"

# The others take a launch each, too.
QUICK = {
    ("SIGINT", GROUP),
    ("SIGUSR1", ONE_RANK),
    ("SIGUSR1", TORCHRUN),
    ("SIGKILL", TORCHRUN),
}

TO: dict[str, Callable[[Started, signal.Signals], None]] = {
    TORCHRUN: lambda process, number: os.kill(process.pid, number),
    LOADING: lambda process, number: os.kill(process.pid, number),
    GROUP: lambda process, number: os.killpg(process.pid, number),
    ONE_RANK: lambda process, number: os.kill(ranks_of(process)[-1], number),
    ONE_NODE: lambda process, number: os.kill(process.pid, number),
    ALONE: lambda process, number: os.kill(process.pid, number),
}


def ranks_of(process: Started) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [pid for pid in map(int, children) if b"fsdp2.train" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def started(to: str, folder: Path, *flags: str) -> list[Started]:
    """What gets the signal, and the other node if there is one."""
    program = ["-m", "fsdp2.train", *SMALL, *flags, *(["--loader-workers=1"] if to == LOADING else [])]
    if to == ALONE:
        return [start([sys.executable, *program], folder)]
    if to != ONE_NODE:
        return [start(torchrun(2, *program), folder)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    nodes = ["torchrun", "--nproc_per_node=1", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return [start([*nodes, f"--node-rank={node}", *program], folder) for node in (0, 1)]


def test_the_table_has_each_case() -> None:
    cases = [row[:2] for row in TABLE]
    assert len(cases) == len(set(cases))
    assert {to for _, to in cases} == set(TO)
    for to in (TORCHRUN, ONE_RANK):
        assert {number for number, there in cases if there == to} >= {"SIGINT", "SIGTERM", "SIGUSR1", "SIGKILL"}
    assert set(cases) >= QUICK


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row[:2] in QUICK else pytest.mark.slow, id=" to ".join(row[:2])) for row in TABLE],
)
def test_a_signal_does_what_the_table_says(tmp_path: Path, row: tuple[str, ...]) -> None:
    name, to, saves, reason, ends_with = row
    run = tmp_path / "run"
    processes = started(to, tmp_path, f"--run-dir={run}", "--max-steps=400", "--checkpoint-every=2")
    wait_for_step(run, processes[0])
    TO[to](processes[0], signal.Signals[name])
    status, out, err = finish(processes[-1], timeout=60)  # its pipes are open for as long as one of its ranks lives
    for other in processes[:-1]:
        finish(other, timeout=60)
    assert ends_with == (f"its own {signal.Signals(-status).name}" if status < 0 else str(status)), err
    ends, saved = metrics(run, "end"), metrics(run, "checkpoint")[-1]["step"]
    if saves == "yes":
        (end,) = ends
        assert end["reason"] == reason.strip("`")
        assert 3 <= end["step"] == saved < 400
        assert [record["step"] for record in metrics(run, "train")] == list(range(1, saved + 1))
        if len(processes) == 1:
            assert f"{end['reason']}: saved at step {saved}" in out
        assert "fsdp2/train.py" not in err, "no rank shows a traceback"
    else:
        assert (ends, reason) == ([], "")
        assert saved % 2 == 0, "what --checkpoint-every=2 has saved is what there is"


IN_A_GROUP = """
import os, signal, subprocess, torch
from fsdp2.data.loader import Batches
from tests.test_data import _batches
got = []
signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
batches = _batches(40, 0, 1, 1, workers=1)
steps = iter(batches)
next(next(steps))
subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"])  # as torchrun does
for step in steps:
    for _ in step:
        pass
(loader,) = open(f"/proc/self/task/{os.getpid()}/children").read().split()
print(len(got), batches.position, loader, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a loader's process takes the signals of its rank")
def test_a_loader_s_process_takes_no_signal_of_its_rank_s_group_and_dies_with_its_rank() -> None:
    process = subprocess.run(
        [sys.executable, "-c", IN_A_GROUP], capture_output=True, text=True, start_new_session=True, timeout=60,
        env=python_environment() | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.returncode == -signal.SIGKILL, process.stderr
    received, position, loader = process.stdout.split()
    assert (received, position) == ("1", "40")
    until = time.monotonic() + 2.0  # of its own accord torch's loader looks after its rank every 5 s
    while Path(f"/proc/{loader}").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_ranks_that_start_up_end_with_their_launcher(tmp_path: Path) -> None:
    (process,) = started(TORCHRUN, tmp_path, f"--run-dir={tmp_path / 'run'}")
    while len(ranks_of(process)) < 2 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    # Else they wait for half an hour for the store that was in torchrun, and rank 0 holds the run directory.
    assert finish(process, timeout=60)[0] == -signal.SIGKILL
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_request_to_save_that_comes_early_is_kept_until_there_is_a_step() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    stop = signals.StopSignals()
    with stop.early():
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # ends a run that starts
        signal.raise_signal(signal.SIGUSR1)
        with stop:
            assert stop.reason == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_signal_to_another_node_is_a_failure_to_torchrun_here(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = signals.StopSignals()
    monkeypatch.setattr(signals, "SECONDS_APART", 0.0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    for ranks, reason, fails in (
        ({0: "SIGTERM"}, "SIGTERM, on another node", True),
        ({0: "SIGUSR1"}, "SIGUSR1, on another node", False),  # which ranks alone get, and no torchrun
        ({3: "SIGTERM"}, "SIGTERM", False),  # of this node
        ({0: "SIGINT", 2: "SIGTERM"}, "SIGTERM", False),
        ({1: signals.LAUNCHER_GONE}, f"{signals.LAUNCHER_GONE}, on another node", True),
        ({2: signals.LAUNCHER_GONE}, signals.LAUNCHER_GONE, True),
    ):
        monkeypatch.setattr(signals, "gather", lambda own, ranks=ranks: [(n // 2 * 2, ranks.get(n)) for n in range(4)])
        assert stop.agreed(World(2, 4, 0, 2)) == reason
        assert signals.fails_to_torchrun(reason) == fails
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert signals.fails_to_torchrun("SIGUSR1, on another node")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not signals.fails_to_torchrun("SIGTERM, on another node")  # of SLURM's tasks, say


def test_a_launcher_that_died_before_this_process_could_look_is_known_by_its_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its parent is another one from the first look on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        assert not store_gone()
    assert store_gone()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")  # then rank 0 is the one to serve it
    assert not store_gone()


@pytest.mark.parametrize(
    "text",
    [
        "[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:9999",
        "Read error [127.0.0.1]:21455: Connection reset by peer",
        "NCCL error: remote process exited or there was a network error",
        "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    ],
)
def test_a_lost_peer_is_told_from_a_cause(text: str) -> None:
    assert lost_peer(text)
    assert not lost_peer("CUDA out of memory")


@pytest.mark.parametrize(
    "error",
    [ValueError("a server said: Connection reset by peer"), FileNotFoundError(2, "none", "a"), RuntimeError("odd")],
)
def test_an_error_of_its_own_is_a_line_and_not_taken_for_a_lost_peer(
    capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    with pytest.raises(type(error)) as caught, ending.exit_status():
        raise error
    assert caught.value is error  # so that its traceback is shown
    line = f"fsdp2: stopped: rank 0 on {socket.gethostname()}: {type(error).__name__}: {error}\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(("rank", "line"), [("0", "fsdp2: stopped by Ctrl-C\n"), ("1", "")])
def test_ctrl_c_outside_of_the_loop_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, line: str
) -> None:
    """While a training starts, and in the tools beside it."""
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as caught, ending.exit_status():
        signal.raise_signal(signal.SIGINT)
    assert (caught.value.code, capsys.readouterr().err) == (130, line)

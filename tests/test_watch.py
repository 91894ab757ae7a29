"""A run that hangs ends in the time of its steps, and names the rank that the others wait for."""

from __future__ import annotations

import dataclasses
import json
import os
import pdb
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2.config import parse
from fsdp2.evaluate import evaluate
from fsdp2.run.directory.rundir import RunDir
from fsdp2.run.process.ending import exit_status
from fsdp2.run.watch import hangs as watch
from fsdp2.run.watch import waiting
from fsdp2.run.watch.hangs import Watch
from fsdp2.run.watch.waiting import Standing, verdict
from fsdp2.train import main
from tests.harness import PROCESSES, Ranks, make_engine, one_step, small

SECONDS = 3.0  # that rank 1 takes by itself, where --timeout is 2


class Slow:
    """A part of the state that rank 1 takes long to give, the first time."""

    def __init__(self) -> None:
        self.seconds = SECONDS

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            time.sleep(self.seconds)
        self.seconds = 0.0
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is resumed here")


def _slow_but_sound(line: list[str]) -> str:
    """A run whose rank 1 takes its time in the first step, in a save and in an evaluation."""
    begun = time.monotonic()

    def slow(*arguments: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(SECONDS)
        return evaluate(*arguments)

    def on_event(kind: str, data: dict[str, Any]) -> None:
        if dist.get_rank() == 1 and kind == "start":  # which is in the first step
            time.sleep(SECONDS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp2.train.evaluate", slow)
        for name in ("STILL", "TALK"):  # so that an alarm would end the run before rank 1 goes on
            patch.setattr(watch, name, 0.1)
        end = main(parse(line), on_event, {"slow": Slow()})
    assert time.monotonic() - begun > 3 * SECONDS
    return str(end["reason"])


def test_the_first_step_a_save_and_an_evaluation_may_take_their_time(ranks: Ranks, tmp_path: Path) -> None:
    line = small(tmp_path / "run", "--timeout=2", "--max-steps=3", "--checkpoint-every=2")
    assert ranks.run(_slow_but_sound, line) == ["finished", "finished"]
    assert not (tmp_path / "run" / "hang.txt").exists()


def _sleep(rank: int) -> None:
    if rank == 1:
        time.sleep(1000)


def _stop(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def _stop_first(rank: int) -> None:
    _stop(rank + 1)


def _leave_one_out(rank: int) -> None:
    if rank == 0:
        dist.barrier()


def _debug(rank: int) -> None:
    """A breakpoint at which a user looks around for longer than a step may take."""
    watch.ANSWER = 2.0
    if rank == 1:
        reading, writing = os.pipe()
        threading.Timer(4 * SECONDS, lambda: os.write(writing, b"c\n")).start()
        sys.stdin = os.fdopen(reading)
        pdb.Pdb(nosigint=True).set_trace()


def _suspend(rank: int) -> None:
    """Stand still for longer than a step may take, as all ranks of a suspended job do."""
    watch.ANSWER, pid = 1.0, os.getpid()
    with subprocess.Popen(["sh", "-c", f"sleep {4 * SECONDS}; kill -CONT {pid}"]):
        os.kill(pid, signal.SIGSTOP)


def _go_on_when_asked(rank: int) -> None:
    """Sleep until this rank has said where it stands."""
    if rank == 1:
        asked, real = threading.Event(), Watch._standing

        def say(self: Watch) -> Standing:
            found = real(self)
            asked.set()
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Watch, "_standing", say)
            assert asked.wait(60)


def _run_rank(rank: int, port: int, agent: bool, line: list[str], fault: Callable[[int], None], output: Path) -> None:
    with open(output, "wb", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    names = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    names |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": agent}
    os.environ.update({name: str(value) for name, value in names.items()})
    done: list[bool] = []

    def on_event(kind: str, data: dict[str, Any]) -> None:
        # The record of a step comes one step late: this is in step 3.
        if kind == "train" and data["step"] == 2 and not done:
            done.append(True)
            fault(rank)

    with exit_status():
        main(parse(line), on_event)


def _start(
    fault: Callable[[int], None], folder: Path, agent: bool = True, flags: Sequence[str] = ()
) -> tuple[list[Any], str]:
    """Exit codes of two ranks, None of one that still runs, and what they printed.

    Args:
        agent: whether the store is a launcher's, as under torchrun, or rank 0's.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if agent else None
    line = small(folder / "run", "--timeout=2", "--max-steps=8", "--no-save-model", *flags)
    outputs = [folder / f"rank{rank}.log" for rank in range(2)]
    processes = [
        PROCESSES.Process(target=_run_rank, args=(rank, port, agent, line, fault, outputs[rank])) for rank in range(2)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and any(process.is_alive() for process in processes):
        if any(process.exitcode == 3 for process in processes):
            deadline = min(deadline, time.monotonic() + 3)  # so that one that was stopped is given up
        time.sleep(0.1)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    del store
    return codes, "\n".join(output.read_text(errors="replace") for output in outputs)


def test_a_rank_that_sleeps_is_named_and_all_end(tmp_path: Path) -> None:
    codes, printed = _start(_sleep, tmp_path)
    assert codes == [3, 3], printed
    (said,) = [line for line in printed.splitlines() if line.startswith("fsdp2:")]
    assert "stopped: behind is rank 1" in said
    assert "step 3" in said
    assert "test_watch.py" in said
    last = r"\d+ collectives, the last gloo:\w+ \d+ of ranks 0, 1: \[\[\d+\]\] to \[\[.*\]\] of \w+"
    assert re.search(f"{last}; runs at .*; others have begun {last};", said)
    written = (tmp_path / "run" / "hang.txt").read_text()
    assert "time.sleep(1000)" in written
    assert "rank 0" in written
    assert "waits in " in written
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["kind"] == "failure"
    assert "behind is rank 1" in last["error"]


def test_a_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    codes, printed = _start(_stop, tmp_path)
    assert codes == [3, None], printed
    assert "rank 1 doesn't answer" in printed
    assert "train_step" in (tmp_path / "run" / "hang.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "agent"), [("ddp", True), ("fsdp1", True), ("fsdp2", False)])
def test_a_rank_that_sleeps_is_named_under_each_strategy(tmp_path: Path, strategy: str, agent: bool) -> None:
    codes, printed = _start(_sleep, tmp_path, agent, [f"--strategy={strategy}"])
    assert codes == [3, 3], printed
    assert "stopped: behind is rank 1" in printed


@pytest.mark.slow
@pytest.mark.parametrize("agent", [True, False])
def test_rank_0_is_stopped_whoever_has_the_store(agent: bool, tmp_path: Path) -> None:
    codes, printed = _start(_stop_first, tmp_path, agent)
    assert codes == [None, 3], printed
    assert ("rank 0 doesn't answer" if agent else "rank 0, or its node, has stopped") in printed
    assert "train_step" in (tmp_path / "run" / "hang.txt").read_text()


@pytest.mark.slow
def test_a_collective_that_a_rank_leaves_out(tmp_path: Path) -> None:
    codes, printed = _start(_leave_one_out, tmp_path)
    assert codes == [3, 3], printed
    assert "one was left out" in printed


@pytest.mark.slow
def test_nothing_ends_while_someone_debugs(tmp_path: Path) -> None:
    codes, printed = _start(_debug, tmp_path)
    assert codes == [0, 0], printed
    assert "(Pdb)" in printed


@pytest.mark.slow
def test_nothing_ends_if_a_rank_goes_on_while_all_are_asked(tmp_path: Path) -> None:
    codes, printed = _start(_go_on_when_asked, tmp_path)
    assert codes == [0, 0], printed


@pytest.mark.slow
def test_nothing_ends_because_a_job_was_suspended(tmp_path: Path) -> None:
    codes, printed = _start(_suspend, tmp_path)
    assert codes == [0, 0], printed


def _alone(folder: Path, *flags: str) -> Watch:
    """The watch of a run of one process, whose threads don't run."""
    return Watch(parse(small(folder, *flags)), torch.nn.Linear(1, 1), RunDir(str(folder)), lambda text: None)


def test_the_limit_of_a_step_follows_from_the_slowest_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("fsdp2.run.watch.hangs.time", SimpleNamespace(monotonic=lambda: now))
    for flags, expected in (([], [1800, 30, 70, 1800, *[1800] * 15, 30]), (["--timeout=7"], [1800, *[7] * 19])):
        one, limits = _alone(tmp_path, *flags), []
        for step, seconds in enumerate([2.0, 7.0, 300.0, *[0.5] * 17], 1):
            one.begin_step(step)
            limits.append(one._doing.limit)
            now += seconds
        assert limits == expected
        with one.phase("evaluation"):
            assert one._doing.limit == 1800
        assert one._doing.limit == 1800


def test_a_run_directory_that_is_gone_does_not_hide_the_stacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _alone(tmp_path / "gone")._write("the stacks")
    said = capsys.readouterr().err
    assert "hang.txt was not written: [Errno 2]" in said
    assert "the stacks" in said


def _at(rank: int, **changed: Any) -> Standing:
    usual = Standing(rank, "a", 7, "step", 40.0, 100, "", "all_reduce", "train.py:212 (train_step)", "", "")
    return dataclasses.replace(usual, **changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "all ranks wait in the same collective"),
        ({"collectives": 99}, "behind is rank 2 (a): step 7, for 40 s; 99 collectives"),
        ({"collectives": 99, "waits_in": ""}, "behind is rank 2"),
        ({"waits_in": ""}, "behind is rank 2"),
        ({"step": 8, "waits_in": "all_gather"}, "one was left out: rank 2"),
        ({"waits_in": "all_gather"}, "one was left out: rank 2"),
    ],
)
def test_who_is_behind(changed: dict[str, Any], said: str) -> None:
    ranks = {rank: _at(rank, **(changed if rank == 2 else {})) for rank in range(4)}
    assert said in verdict(ranks, 4)
    assert verdict({**ranks, 0: _at(0, busy="a debugger")}, 4) == ""
    assert verdict({rank: one for rank, one in ranks.items() if rank not in (1, 3)}, 4).startswith("ranks 1, 3 don't")


def _counts() -> list[int]:
    """The number of collectives that this rank has begun, as others begin."""
    groups = [dist.group.WORLD]
    found = [waiting.collectives_begun(groups)]
    for collective in (dist.barrier, lambda: dist.all_reduce(torch.ones(1)), lambda: dist.broadcast(torch.ones(1), 0)):
        collective()
        found.append(waiting.collectives_begun(groups))
    return [count - found[0] for count in found]


def test_torch_counts_collectives_of_a_group(ranks: Ranks) -> None:
    assert ranks.run(_counts) == [[0, 1, 2, 3]] * 2


def _last() -> list[str]:
    """What the others wait for, if the last rank is late."""
    one: Any = dist.new_group([0, 1])
    found = []
    for group in (None, one):
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2), group=group)
        found.append(waiting.last_collective([dist.group.WORLD, one]))
    dist.all_reduce(torch.ones(2, 3))
    return [*found, waiting.last_collective([])]


def test_torch_records_the_last_collective(ranks: Ranks) -> None:
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"):
        pytest.skip(f"torch {torch.__version__} records no collectives of gloo")
    for first, second, third in ranks.run(_last):
        number = int(first.split()[1])
        assert first == f"gloo:all_gather {number} of ranks 0, 1: [[2]] to [[2, 2]] of Float"
        assert second == "gloo:all_gather 1 of ranks 0, 1: [[2]] to [[2, 2]] of Float"
        assert third == f"gloo:all_reduce {number + 1} of group default_pg: [[2, 3]] to [[2, 3]] of Float"


def _counted(flags: str) -> tuple[list[int], int]:
    """How many collectives each of two steps has begun, and how many groups of torch's had some that weren't counted.

    torch knows all groups under a private name alone."""
    engine = make_engine(flags)
    groups = waiting.groups_of(engine.model)
    every = list(dist.distributed_c10d._world.pg_map)
    before = {group: waiting.collectives_begun([group]) for group in every}
    found = [waiting.collectives_begun(groups)]
    for _ in range(2):
        one_step(engine)
        found.append(waiting.collectives_begun(groups))
    used = [group for group in every if waiting.collectives_begun([group]) > before[group]]
    return [found[1] - found[0], found[2] - found[1]], sum(group not in groups for group in used)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--replicas=2",
        "--strategy=ddp",
        "--strategy=fsdp1",
        "--strategy=fsdp1 --fsdp1-sharding=hybrid-shard --replicas=2",
    ],
)
def test_each_strategys_collectives_are_counted(ranks: Ranks, flags: str) -> None:
    first, *others = ranks.run(_counted, flags, ranks=4 if "replicas" in flags else 2)
    assert all(one == first for one in others)
    steps, left_out = first
    assert min(steps) > 0
    assert left_out == 0


def _while_compiling() -> list[str]:
    """In what this thread is busy whenever the compiler of a function, and of its backward, calls a pass of ours; and
    in a backend of ours."""
    found: list[str] = []

    def see(*_: object) -> None:
        place = waiting.look(threading.get_ident(), rank=0, step=1, phase="step", seconds=0.0, collectives=0, last="")
        found.append(place.busy)

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        see()
        return graph.forward

    with torch._inductor.config.patch(post_grad_custom_pre_pass=see, force_disable_caches=True):
        compiled = torch.compile(lambda x: (x.sin() * x).sum())
        compiled(torch.ones(8, requires_grad=True)).backward()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(8))
    return found


@pytest.mark.slow
def test_a_compilation_is_no_hang(ranks: Ranks) -> None:
    assert ranks.run(_while_compiling, ranks=1) == [["a compilation"] * 3]

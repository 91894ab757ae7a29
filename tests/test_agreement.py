"""Ranks that differ, or can't meet, end before their first collective in one line, the same on each of them."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2.config import Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import to_flags
from fsdp2.run.process import agreement, ending, group, meeting
from fsdp2.run.process.agreement import MAY_DIFFER, difference, facts, require_agreement
from fsdp2.run.process.variables import check_variables, require_address, speaks
from fsdp2.train import main
from tests.harness import PROCESSES, Ranks, small
from tests.programs import in_a_process
from tests.test_launch import SMALL, finish, start

CPU = torch.device("cpu")


def world(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The facts of ranks on hosts n0, n1, …, each with its changes."""
    found = []
    for rank, change in enumerate(changes):
        one = facts(to_flags(Config()), CPU, len(changes))
        one["host"] = f"n{rank}"
        one["gpu"] = change.pop("gpu", None)
        found.append({**one, "same": {**one["same"], **change}})
    return found


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ([{}, {}, {}], None),
        (
            [{}, {"--lr": 0.2}, {}],
            "--lr: rank 1 (n1) has 0.2, and rank 0 (n0) has 0.001; give each rank the same command",
        ),
        (
            [{}, {"--lr": 0.2}, {"--lr": 0.2, "--timeout": 7}],
            "--lr: ranks 1, 2 (n1, n2) have 0.2, and rank 0 (n0) has 0.001 (--timeout differs, too); give each rank "
            "the same command",
        ),
        (
            [{}, {agreement.CODE: "aa", "--lr": 1}],
            f"the code of fsdp2: rank 1 (n1) has aa, and rank 0 (n0) has {agreement.code()} (--lr differs, too); "
            "install the same version on each node, or one that all nodes share",
        ),
        (
            [{"--device": "cuda"}, {}],
            "--device: rank 1 (n1) has cpu, and rank 0 (n0) has cuda; leave the node out, or use --device cpu",
        ),
        ([{}, {"--new": 3}], "--new: rank 1 (n1) has 3, and rank 0 (n0) has null; give each rank the same command"),
        (
            [{"gpu": "GPU-a"}, {"gpu": "GPU-b"}, {"gpu": "GPU-a"}],
            "--device cuda: ranks 0, 2 (n0, n2) see the same GPU (GPU-a); bind one to each process (srun "
            "--gpus-per-task=1), show all of them to all (CUDA_VISIBLE_DEVICES), or start fewer ranks",
        ),
        ([{"gpu": "GPU-a"}, {"gpu": "GPU-b"}], None),
    ],
)
def test_the_line_names_ranks_hosts_and_both_values(changes: list[dict[str, Any]], line: str | None) -> None:
    assert difference(world(*changes)) == line


def test_a_thousand_ranks_make_a_line_of_bounded_length() -> None:
    found = world(*[{} if rank < 24 else {"--lr": 0.2} for rank in range(1000)])
    line = difference(found)
    assert line is not None
    assert line.startswith("--lr: ranks 24, 25, 26, 27, 28, 29, 30, 31 and 968 more (n100, n101, ")
    assert len(line) < 250


def test_what_belongs_to_a_node_may_differ() -> None:
    flags = to_flags(Config())
    assert set(MAY_DIFFER) <= set(flags)
    mine, other = (facts({**flags, **dict.fromkeys(MAY_DIFFER, n)}, CPU, 2) for n in (1, 2))
    assert difference([mine, other]) is None


@pytest.mark.parametrize("package", ["fsdp2", "fsdp2_extra"])
def test_the_code_is_the_packages_own(
    package: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / package / "a.py"
    file.parent.mkdir()
    file.write_text("a = 1\n")
    agreement.code.cache_clear()
    request.addfinalizer(agreement.code.cache_clear)
    monkeypatch.setattr("fsdp2.__file__", str(tmp_path / "fsdp2" / "__init__.py"))
    before = agreement.code()
    file.write_text("a = 2\n")
    agreement.code.cache_clear()
    assert agreement.code() != before


def _train_apart(run: Path) -> str:
    """Train, with another learning rate on rank 1; this rank's refusal."""
    with pytest.raises(ConfigError) as caught:
        main(parse(small(run, "--max-steps=1", *(["--lr=0.5"] if dist.get_rank() == 1 else []))))
    return str(caught.value)


def test_a_run_whose_ranks_differ_is_refused_by_all_of_them(ranks: Ranks, tmp_path: Path) -> None:
    (line,) = set(ranks.run(_train_apart, tmp_path / "run", ranks=3))
    assert line.startswith(f"--lr: rank 1 ({socket.gethostname()}) has 0.5, and rank 0 ")
    assert not (tmp_path / "run").exists(), "nothing was trained there"


def test_what_is_the_same_stands_in_the_store_once() -> None:
    """Else what rank 0 reads, and what the store holds, is two kilobytes a rank."""
    store = dist.HashStore()
    found = world(*[{"--lr": 0.2} if rank == 9 else {} for rank in range(10)])
    for rank, one in enumerate(found):
        agreement.write(one, store, rank)
    assert store.num_keys() == len(found) + 2
    assert max(len(store.get(f"agreement/{rank}")) for rank in range(10)) < 200


@pytest.mark.parametrize("changed", [None, 2])
def test_all_ranks_read_one_verdict_from_the_store(changed: int | None) -> None:
    """Each with a connection of its own, as before there is a group."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    found = world(*[{"--lr": 0.2} if rank == changed else {} for rank in range(4)])
    said: list[str] = []

    def rank(number: int) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=20))
        try:
            require_agreement(found[number], store, number, 4, timedelta(seconds=20))
            said.append("")
        except ConfigError as error:
            said.append(str(error))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    expected = difference(found)
    assert said == [expected or ""] * 4


def _come(rank: int, port: int, output: Path, line: list[str], ranks: int = 4) -> None:
    """A rank without torchrun, as of a SLURM task, which waits for a second before it says so, and for two at most."""
    with open(output, "wb", buffering=0) as log:
        os.dup2(log.fileno(), 2)
    names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}})
    with pytest.MonkeyPatch.context() as patch, ending.exit_status():
        patch.setattr(group, "LONG", timedelta(seconds=3))
        patch.setattr(ending, "_ended_by_launcher", lambda: False)  # nobody ends the others
        patch.setattr(meeting, "SECONDS_IN_SILENCE", 1.0)
        patch.setattr(agreement, "SECONDS_TO_READ", 3.0)
        main(parse(line))


@pytest.mark.parametrize(
    ("came", "waiting", "end"),
    [
        ((0, 1), "waiting for ranks 2, 3, not there for 1 s", "WORLD_SIZE=4: without ranks 2, 3, not there for 3 s; "),
        (
            (1, 2),
            "waiting for rank 0: MASTER_ADDR=127.0.0.1: nothing listens at port {port} for 1 s",
            "MASTER_ADDR=127.0.0.1: nothing listens at port {port} for 3 s",
        ),
    ],
)
def test_ranks_that_do_not_come_are_named(tmp_path: Path, came: Sequence[int], waiting: str, end: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outputs = [tmp_path / f"rank{rank}.log" for rank in came]
    line = small(tmp_path / "run", "--max-steps=1")
    processes = [
        PROCESSES.Process(target=_come, args=(rank, port, output, line))
        for rank, output in zip(came, outputs, strict=True)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    said = [output.read_text() for output in outputs]
    assert [process.exitcode for process in processes] == [2, 2], said
    assert f"fsdp2: {waiting.format(port=port)}" in said[0]
    for one in said:
        assert f"fsdp2: error: {end.format(port=port)}" in one
    assert not (tmp_path / "run").exists(), "nothing was trained there"


@pytest.mark.parametrize("refusing", [[0], [1], [0, 1]])
def test_a_rank_that_refuses_tells_those_that_would_wait_for_it(tmp_path: Path, refusing: list[int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outputs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
    processes = []
    for rank, output in enumerate(outputs):
        line = small(tmp_path / "run", "--max-steps=1", *(["--lr=-1"] if rank in refusing else []))
        processes.append(PROCESSES.Process(target=_come, args=(rank, port, output, line, 2)))
        processes[-1].start()
    for process in processes:
        process.join(60)
        process.kill()
    said = [output.read_text() for output in outputs]
    assert [process.exitcode for process in processes] == [2, 2], said
    for rank, one in enumerate(said):
        whose = "" if rank in refusing else rf"rank {refusing[0]} \(.*\): "
        assert re.search(rf"^fsdp2: error: {whose}--lr -1", one, re.MULTILINE), one


GOOD = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({}, None),
        (GOOD, None),
        ({**GOOD, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, None),
        ({"MASTER_ADDR": "n0"}, None),  # from somebody's .bashrc
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),  # the batch script's own, or salloc's shell
        ({"RANK": "0"}, "RANK is set, but not WORLD_SIZE and MASTER_ADDR and MASTER_PORT; set all of RANK, WORLD_"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but not RANK and MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}, "SLURM_STEP_NUM_TASKS=8: RANK and WORLD_SIZE aren't set"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE=2: RANK and WORLD_SIZE"),
        ({**GOOD, "RANK": "4"}, "RANK=4: must be less than WORLD_SIZE, which is 4"),
        ({**GOOD, "RANK": "-1"}, "RANK=-1: must be a whole number"),
        ({**GOOD, "WORLD_SIZE": "$SLURM_NTASKS"}, "WORLD_SIZE=$SLURM_NTASKS: must be a whole number"),
        ({**GOOD, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2: must be less than LOCAL_WORLD_SIZE"),
        ({**GOOD, "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8: must be WORLD_SIZE, which is 4, or less"),
        ({**GOOD, "MASTER_PORT": "70000"}, "MASTER_PORT=70000: must be from 1 to 65535"),
    ],
)
def test_a_launchers_variables(variables: dict[str, str], part: str | None) -> None:
    if part is None:
        check_variables(variables)
    else:
        with pytest.raises(ConfigError) as caught:
            check_variables(variables)
        assert str(caught.value).startswith(part)


def test_one_process_says_it_for_all() -> None:
    assert [speaks({"RANK": "0"}), speaks({"RANK": "1"}), speaks({"SLURM_PROCID": "1"}), speaks({})] == [1, 0, 0, 1]
    assert speaks({"RANK": "0", "SLURM_PROCID": "1"}), "torchrun on the second node knows better"


def test_a_host_without_an_address_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    require_address("127.0.0.1", say=True, seconds=0)
    require_address("::1", say=True, seconds=0)
    assert capsys.readouterr().err == ""
    for name in ("no-such-host.invalid", "a" * 70):
        with pytest.raises(ConfigError, match=rf"MASTER_ADDR={name}: .* finds no address for this name .*--local-addr"):
            require_address(name, say=True, seconds=0)


def test_a_name_that_gets_its_address_late_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[Callable[[], Any]] = [lambda: 1 / 0, list]

    def late(*_: Any) -> Any:
        try:
            return answers.pop(0)()
        except ZeroDivisionError:
            raise socket.gaierror(-2, "Name or service not known") from None

    monkeypatch.setattr(socket, "getaddrinfo", late)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    require_address("worker-0.train", say=True)
    assert answers == []
    assert "waiting up to 60 s for an address of worker-0.train, the host of rank 0" in capsys.readouterr().err


def test_a_variable_alone_is_named(tmp_path: Path) -> None:
    status, printed = in_a_process("-m fsdp2.train", SMALL, tmp_path, RANK="0")
    assert (status, printed.count("\n")) == (2, 1), printed
    assert printed.startswith("fsdp2: error: RANK is set, but not WORLD_SIZE and MASTER_ADDR and MASTER_PORT; ")
    assert os.listdir(tmp_path) == []


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = str(server.getsockname()[1])
        variables = {**GOOD, "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        status, _, err = finish(start([sys.executable, "-m", "fsdp2.train", *SMALL], tmp_path, **variables))
    assert (status, err.count("\n")) == (2, 1), err
    assert err.startswith(f"fsdp2: error: MASTER_PORT={port}: is taken on ")
    assert os.listdir(tmp_path) == [] or not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(("purpose", "told"), [("doctor", ["why"]), ("training", [])])
def test_a_refusal_after_a_meeting_of_the_doctors_is_told(
    monkeypatch: pytest.MonkeyPatch, purpose: str, told: list[str]
) -> None:
    for name, value in {**GOOD, "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    monkeypatch.setattr(agreement, "MEETINGS", {("localhost", 1, purpose): iter([1])})
    monkeypatch.setattr(agreement, "meeting_point", lambda *_: None)
    monkeypatch.setattr(agreement, "refuse", lambda why, *_: said.append(why))
    agreement.tell_others("why")
    assert said == told

"""A rank that hangs, fails or is stopped is named, and nobody waits for it longer than was asked for."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import torch

from fsdp2.run.process.runtime import World
from fsdp2_tools.doctor.asking import Asker, Here, bounded
from fsdp2_tools.doctor.examine import as_json
from fsdp2_tools.doctor.judging import BAD, OK, WORSE, Hosts, Row, far_above, same, status
from tests.doctor.launch import start
from tests.doctor.threads import examined

HOSTS = Hosts({0: ("a", "10.0.0.1"), 1: ("a", "10.0.0.1"), 2: ("b", "10.0.0.2"), 3: ("b", "10.0.0.2")})


def hangs_on_rank_2(here: Here) -> int:
    here.doing = "reading the disk"
    if here.world.rank == 2:
        threading.Event().wait()
    return here.world.rank


def fails_on_rank_1(here: Here) -> int:
    if here.world.rank == 1:
        raise OSError("no such disk")
    return here.world.rank


def test_a_rank_that_hangs_or_fails_is_named_and_the_others_answer() -> None:
    def ask(asker: Asker) -> Any:
        answers = asker.ask("hangs"), asker.ask("fails"), asker.ask("good")
        verdicts = [row.verdict for row in asker.rows(HOSTS, harmless=[("fails", "failed")])]
        assert verdicts == [BAD, WORSE]
        return answers, asker.rows(HOSTS)

    questions = {"hangs": hangs_on_rank_2, "fails": fails_on_rank_1, "good": lambda here: here.world.rank}
    (hangs, fails, good), rows = examined(4, questions, ask, seconds=0.5)
    assert hangs == {0: 0, 1: 1, 3: 3}
    assert fails == {0: 0, 2: 2, 3: 3}
    assert good == {0: 0, 1: 1, 2: 2, 3: 3}  # who hung in one question still answers the next one
    assert [(row.name, row.verdict, row.who) for row in rows] == [
        ("answer: hangs", BAD, "rank 2 (b)"),
        ("answer: fails", BAD, "rank 1 (a)"),
    ]
    assert rows[0].measured == "reading the disk: stands in threading.py, wait after 0.5 s"
    assert rows[1].measured == "OSError: no such disk"


def test_what_hangs_says_nothing_in_a_later_question_and_holds_the_process_only_while_it_hangs() -> None:
    go_on = threading.Event()

    def hangs(here: Here) -> None:
        go_on.wait()
        here.doing = "reading the disk"

    def fails(here: Here) -> None:
        here.doing = "2. all-reduce"
        go_on.set()
        hanging.join()
        raise OSError("no such link")

    here = Here(World(0, 1, 0, 1), torch.device("cpu"), None, 0.2)
    before = set(threading.enumerate())
    assert "hung" in bounded(hangs, here)
    (hanging,) = set(threading.enumerate()) - before
    assert [still() for still in here.left] == [True]
    assert bounded(fails, here)["doing"] == "2. all-reduce"
    assert [still() for still in here.left] == [False]


def test_a_stopped_rank_is_named_and_the_examination_ends(tmp_path: Path) -> None:
    """SIGSTOP: the process is there, its sockets are open, and it does nothing."""
    first, *others = start(["--quick", "--answer-within=1"], ranks=3, cwd=tmp_path, fault="stopped", at=2)
    try:
        text, _ = first.communicate(timeout=100)
        assert first.returncode == 2, text
        assert "bad    answer: machine" in text
        assert "rank 2 (" in text
        assert others[0].wait(30) == 2
    finally:
        for one in others:
            one.kill()


def test_the_norm_is_the_ranks_own_median() -> None:
    assert far_above({rank: 1.0 + rank / 100 for rank in range(8)}, 1.5) == []
    assert far_above({0: 1.0, 1: 1.1, 2: 1.05, 3: 2.0}, 1.5) == [3]
    assert far_above({0: 1.0, 1: 2.0}, 1.5) == [1]  # of two the faster one is the norm
    assert far_above({0: 1.0, 1: 3.0, 2: 5.0, 3: 7.0, 4: 9.0}, 1.5) == []  # all differ: none is the odd one
    assert far_above({0: 1e-6, 1: 9e-6}, 1.5, least=1e-3) == []


def test_whoever_differs_from_most_is_named() -> None:
    (row,) = same("torch", {0: "2.15", 1: "2.15", 2: "2.14", 3: "2.14", 4: "2.15"}, HOSTS, BAD, "install it")
    assert (row.measured, row.expected, row.who) == ("2.14", "2.15, as on the others", "host b")
    assert HOSTS.named([1]) == "rank 1 (a)"
    assert HOSTS.named([0, 2]) == "ranks 0, 2 (a, b)"
    assert Hosts({0: ("vm", "10.0.0.1"), 1: ("vm", "10.0.0.2")}).of == {0: "vm 10.0.0.1", 1: "vm 10.0.0.2"}


def test_the_status_is_that_of_the_worst_row() -> None:
    rows = [Row("a", "", "", OK), Row("b", "", "", WORSE)]
    assert [status([]), status(rows[:1]), status(rows), status([*rows, Row("c", "", "", BAD)])] == [0, 0, 1, 2]


def test_the_keys_of_json_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    sentence = page.partition("`--json` prints ")[2].partition("[^json]")[0]
    report = json.loads(as_json([Row("a", "1", "2")], World(0, 1, 0, 1)))
    assert re.findall("`([a-z]+)`", sentence) == [*report, *report["rows"][0]]

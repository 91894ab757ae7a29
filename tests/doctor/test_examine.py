"""A report comes whatever isn't answered, and says of the others what it would say without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2.config import Config
from fsdp2_tools.doctor import examine, machine, storage
from fsdp2_tools.doctor.asking import Here, Question
from fsdp2_tools.doctor.judging import BAD, OK, WORSE, Row
from tests.doctor.test_network import EIGHT, on_shared_links
from tests.doctor.threads import examined

KINDS = examine.collectives.KINDS
# What would take long, or can't be done by threads of one process. Four ranks are two hosts.
SHORT: dict[str, Question] = {
    "hello": lambda here: [f"n{here.world.rank // 2}", f"10.0.0.{here.world.rank // 2}"],
    "machine": lambda here: machine.measure(here) | {"loopback": False, "threads": 1, "cores": [here.world.rank]},
    "data": lambda here: "a hash",
    "meet": on_shared_links(EIGHT, first=1.0),
    "collectives": lambda here, sizes, **_: {f"{name} {size}": 1e-5 for name in KINDS for size in sizes},
    "compute": lambda here, seconds: {"flops": 1e11, "memory": 1e10},
}


def report(folder: Path, questions: dict[str, Question]) -> list[Row]:
    options = examine.Options(Config(run_dir=str(folder)), quick=True)
    rows: list[Row] = examined(
        4, {**examine.QUESTIONS, **SHORT, **questions}, lambda asker: examine.examine(asker, options), seconds=5.0
    )
    return rows


def failing(question: Question, ranks: list[int]) -> Callable[..., Any]:
    def asked(here: Here, **arguments: Any) -> Any:
        if here.world.rank in ranks:
            raise OSError("it can't")
        return question(here, **arguments)

    return asked


@pytest.fixture(autouse=True)
def _files_are_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "SEEN_WITHIN", 0.3)


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return report(tmp_path_factory.mktemp("run"), {})


def test_ranks_that_answer_are_fit(fit: list[Row]) -> None:
    assert [row for row in fit if row.verdict != OK] == []


@pytest.mark.parametrize("guilty", [[0], [2], [0, 1, 2, 3]], ids=["rank 0", "rank 2", "all"])
@pytest.mark.parametrize("name", [*examine.QUESTIONS])
def test_a_question_that_ranks_do_not_answer_is_a_row(
    tmp_path: Path, fit: list[Row], name: str, guilty: list[int]
) -> None:
    found = report(tmp_path, {name: failing({**examine.QUESTIONS, **SHORT}[name], guilty)})
    rows = {row.name: row for row in found}
    row = rows.pop("collectives" if name == "collectives" else f"answer: {name}")
    assert row.measured.startswith("OSError: it can't")
    assert row.verdict == (WORSE if (name, "failed") in examine.HARMLESS else BAD)
    if name == "collectives" and len(guilty) > 1:  # the smallest part of them that fails, and that it isn't all
        assert row.who == "host n0; others too"
    else:
        assert row.who.startswith(f"rank {guilty[0]} (" if len(guilty) == 1 else ("ranks 0, 1, 2, 3 (", "hosts n0, n1"))
    if guilty == [2] and name not in ("hello", "meet", "collectives"):
        assert [*rows] == [*{row.name: row for row in fit}]
        assert {row.verdict for row in rows.values()} == {OK}

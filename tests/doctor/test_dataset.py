"""Data that differs between hosts is a row that names one, and what has to be fetched first isn't."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp2.config import Config
from fsdp2_tools.doctor import dataset
from fsdp2_tools.doctor.asking import Asker
from fsdp2_tools.doctor.judging import BAD, OK, Hosts, Row
from tests.doctor.threads import examined
from tests.harness import flip_a_bit, small_mnist

HOSTS = Hosts({rank: ("ab"[rank // 2], f"10.0.0.{rank // 2}") for rank in range(4)})


def rows(*roots: Path | None) -> list[Row]:
    """What is said about ranks with these folders."""

    def ask(asker: Asker) -> list[Row]:
        return [*dataset.rows(asker.ask("data"), HOSTS, "mnist"), *asker.rows(HOSTS)]

    configs = [Config(dataset="mnist", data_root=None if root is None else str(root)) for root in roots]
    found: list[Row] = examined(len(roots), {"data": dataset.measure}, ask, seconds=20.0, configs=configs)
    return found


def test_data_that_differs_names_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is there
    small_mnist(tmp_path / "a")
    flip_a_bit(small_mnist(tmp_path / "b"))
    a, b = tmp_path / "a", tmp_path / "b"
    (row,) = rows(a, a, a, a)
    assert (row.name, row.measured, row.verdict) == ("data", "mnist, read by 4 ranks", OK)
    (row,) = rows(a, a, a, b)
    assert (row.verdict, row.who) == (BAD, "rank 3 (b)")
    (row,) = rows(a, a, None, None)  # which the run will download there
    assert (row.measured, row.verdict) == ("mnist, read by 2 ranks", OK)
    (row,) = rows(None, None, None, None)
    assert (row.measured, row.verdict) == ("mnist isn't on these hosts yet", OK)


def test_data_that_cannot_be_read_names_its_rank(tmp_path: Path) -> None:
    small_mnist(tmp_path / "a")
    broken = small_mnist(tmp_path / "b")
    broken.write_bytes(broken.read_bytes()[:100])
    good, row = rows(tmp_path / "a", tmp_path / "a", tmp_path / "a", tmp_path / "b")
    assert good.verdict == OK
    assert (row.name, row.verdict, row.who) == ("answer: data", BAD, "rank 3 (b)")
    (row,) = rows(*[tmp_path / "b"] * 4)  # not that they have no data yet
    assert (row.name, row.verdict) == ("answer: data", BAD)

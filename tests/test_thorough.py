"""The table of what `make test` leaves out names tests that are there, and leaves out those and no others."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.thorough import KEPT, mark

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("test", KEPT)
def test_each_test_of_the_table_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_the_first_cases_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: Counter[str] = Counter()

    def item(name: str) -> Any:
        return SimpleNamespace(nodeid=name, add_marker=lambda given: marked.update([f"{given} {name}"]))

    monkeypatch.setitem(KEPT, "a.py::many", 2)
    monkeypatch.setitem(KEPT, "a.py::none", 0)
    monkeypatch.setitem(KEPT, "a.py::later", (1, 2))
    names = ["many[1]", "other[1]", "many[2]", "none", "many[3]", "other[2]", "many[4]"]
    mark([item(f"a.py::{name}") for name in (*names, "later[1]", "later[2]", "later[3]")])
    thorough, nightly = ("none", "many[3]", "many[4]", "later[2]", "later[3]"), ("many[3]", "many[4]", "later[3]")
    assert marked == dict.fromkeys(
        [*(f"thorough a.py::{name}" for name in thorough), *(f"nightly a.py::{name}" for name in nightly)], 1
    )

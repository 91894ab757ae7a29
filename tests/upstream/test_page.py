"""docs/upstream.md names tests that exist, and every test of this folder and its report."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "upstream.md").read_text()
SECTIONS = PAGE.partition("\n## Open there")[0].split("\n### ")[1:]
ENTRIES = {section.partition("\n")[0]: section for section in SECTIONS}
ROWS = [line for line in PAGE.splitlines() if line.startswith("| [")]
OWN = "tests/upstream/"


@cache
def _tests_of(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}


def _named(text: str) -> list[str]:
    names = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
    for file, name in names:
        assert name in _tests_of(file), f"{file}::{name}"
    return [file for file, _ in names]


def _with_notes(text: str) -> str:
    """A text with the words of its footnotes in the place of their marks."""
    notes = dict(re.findall(r"^\[\^([\w-]+)\]: (.+)$", PAGE, flags=re.MULTILINE))
    return re.sub(r"\[\^([\w-]+)\](?!:)", lambda mark: notes[mark[1]], text)


def _reports(text: str) -> set[str]:
    found = re.findall(r"\[[\w-]+ (\d+)\]\(https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)\)", text)
    assert all(shown == number for shown, _, number in found)
    return {f"{repository}#{number}" for _, repository, number in found}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES.keys())
def test_an_entry_says_what_happens_there_and_here_and_which_tests_show_it(entry: str) -> None:
    text = re.sub(r"^\[\^.*$", "", entry.partition("\n## ")[0], flags=re.MULTILINE)
    where, _, rest = _with_notes(text).partition("**There:**")
    there, _, here = rest.partition("**Here:**")
    assert _reports(where)
    shown, held = _named(there), _named(here)
    assert all(file.startswith(OWN) for file in shown)
    assert bool(shown) != ("*Not reproduced:*" in there)
    assert held
    assert not any(file.startswith(OWN) for file in held)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_its_test(row: str) -> None:
    assert len(_reports(row)) == 1
    assert any(file.startswith(OWN) for file in _named(row))


def test_every_reproduction_is_on_the_page_with_its_report() -> None:
    assert len(ENTRIES) >= 20
    reports = _reports(PAGE)
    for path in Path(__file__).parent.glob("test_*.py"):
        if path.name == "test_page.py":
            continue
        for name in _tests_of(f"{OWN}{path.name}"):
            assert not name.startswith("test_") or f"`{OWN}{path.name}::{name}`" in PAGE, name
        for report in re.findall(r'"([\w.-]+/[\w.-]+#\d+)"', path.read_text()):
            assert report in reports, report

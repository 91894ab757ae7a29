"""The documentation names only what exists: tests, make targets, files and flags; and it is a site that builds."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp2.config import parser
from tests.docs import commands, shown_code

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SPEAKERS = [source for room in commands.ROOMS for source in sorted((ROOT / room).rglob("*.py"))]
MOST_PAGES = 28  # of the site, notes apart: who looks for an answer reads a list of them
MOST_LINES = 120  # of the README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    assert "\u0000" not in text
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), f"link to {link}"

    folder = ROOT / "tests"
    tests = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("test_*.py")}
    everything = "\n".join(tests.values())
    for file, name in re.findall(r"(?:tests/([\w/]+\.py))?::(test_\w+)", text):
        assert f"def {name}(" in (tests[file] if file else everything), f"{file}::{name}"
    for place in re.findall(r"tests/[\w/]+(?:\.py|/)", text):
        assert (ROOT / place).exists(), place

    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"make ([a-z][a-z0-9-]+)", " ".join(re.findall(r"`([^`]*)`", text))):
        assert target in targets, f"make {target}"

    flags = set(parser()._option_string_actions)
    commands = re.findall(r"(?:-m fsdp2\.train|fsdp2\.train)((?: +\S+)*)", text)
    for flag in re.findall(r"(?<=\s)--[a-z][a-z0-9-]+", " ".join(commands)):
        assert flag in flags, flag


def _without_code(text: str) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_reads_the_same_on_the_site(page: Path) -> None:
    text = _without_code(page.read_text())
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).resolve().is_relative_to(DOCS), f"{link} isn't part of the site: name it as `code`"
    notes = set(re.findall(r"^\[\^([\w-]+)\]:", text, flags=re.MULTILINE))
    assert set(re.findall(r"\[\^([\w-]+)\](?!:)", text)) == notes, "footnotes that nothing names, or that aren't there"
    # Python-Markdown, unlike GitHub, takes a list right below a paragraph for a part of it.
    lists = re.findall(r"^(?![-*] |[|>#]|\d+\. | |$).+\n(?:[-*]|1\.) .*", text, flags=re.MULTILINE)
    assert not lists, f"an empty line is missing before the list: {lists}"


def test_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text().splitlines()) <= MOST_LINES


def _listed(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in _listed(part)]


def test_the_site_lists_each_page_once_and_is_small() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert sorted(_listed(nav)) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES[1:])
    assert len(_listed([part for part in nav if "Notes" not in part])) <= MOST_PAGES


def test_the_site_builds_without_a_link_that_leads_nowhere_or_to_a_network(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    (tmp_path / "zensical.toml").write_text((ROOT / "zensical.toml").read_text())
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # for the tabs
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (tmp_path / "build" / "docs").rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|iframe)[^>]* src="?(https?:[^" >]*)', page.read_text())
        fetched += re.findall(r'<link[^>]* href="?(https?:[^" >]*)', page.read_text())
        assert not fetched, page


def _messages(source: Path) -> Iterator[str]:
    """The texts that a source raises, prints or warns with; each value in one is "{}"."""
    for node in ast.walk(ast.parse(source.read_text())):
        called = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Raise) and called not in ("print", "warn", "warning", "say"):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.JoinedStr):
                yield "".join(str(piece.value) if isinstance(piece, ast.Constant) else "{}" for piece in part.values)
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value


def test_pages_help_and_messages_avoid_the_words_that_our_style_avoids() -> None:
    """docs/contributing.md, "How we write"."""
    avoided = re.compile(r"\b(?:anew|shall|otherwise|(?:is|are) said|for want of|so far as|can't be told)\b")
    texts = {page.relative_to(ROOT).as_posix(): _without_code(page.read_text()) for page in PAGES}
    texts["docs/contributing.md"] = texts["docs/contributing.md"].replace('"anew" and "shall"', "")
    texts |= {f"{one.prog} --help": one.format_help() for one in commands.parsers()}
    texts |= {f"messages of {source.relative_to(ROOT)}": "\n".join(_messages(source)) for source in SPEAKERS}
    found = {name: [line for line in text.splitlines() if avoided.search(line)] for name, text in texts.items()}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize("notebook", shown_code.NOTEBOOKS)
def test_a_notebook_prints_the_code_that_there_is(notebook: str) -> None:
    text = (ROOT / "docs" / notebook).read_text()
    if "launchers" in text:
        pytest.importorskip("ray")
    assert shown_code.printed_again(notebook) == text, "python -m tests.docs.reference prints it again"

"""The documentation names only what exists: tests, make targets, files and flags."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fsdp2.config import parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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
    for flag in re.findall(r"(?<=\s)--[a-z][a-z-]+", " ".join(commands)):
        assert flag in flags, flag


@pytest.mark.parametrize("notebook", ["tutorial.ipynb", "deepspeed_tutorial.ipynb"])
def test_a_notebook_prints_the_code_that_there_is(notebook: str) -> None:
    names: dict[str, Any] = {}
    exec("import inspect", names)
    for cell in json.loads((ROOT / "docs" / notebook).read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or "getsource" not in source:
            continue
        if "launchers" in source:
            pytest.importorskip("ray")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(source, names)
        (output,) = cell["outputs"]
        assert "".join(output["text"]) == printed.getvalue(), "run the notebook's cell again"

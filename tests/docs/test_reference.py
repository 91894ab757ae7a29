"""What the documentation says about flags, records, variables and messages is what the code has."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2 import minimal
from launchers.ray_options import parse
from tests.docs import reference
from tests.docs.reference import DOCS, PAGES, RECORDS, ROOT, VARIABLES
from tests.docs.tabs import of_ray, tabs


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_what_the_code_has(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "python -m tests.docs.reference writes it again"


@pytest.mark.parametrize(
    "flags", [[], ["--model=transformer", "--mixed-precision=fp16"], ["--async-checkpoint", "--checkpoint-every=2"]]
)
def test_each_field_of_a_record_is_explained(flags: list[str], train: Callable[..., Any]) -> None:
    model = [] if "--model=transformer" not in flags else ["--model-size=debug", "--seq-len=16"]
    events = [*train(*flags, *model, steps=4), *train(*flags, *model, steps=6)]
    assert {kind for kind, _ in events} >= {"start", "resume", "train", "eval", "checkpoint", "end"}
    for kind, data in events:
        text = " ".join([*RECORDS[kind], *(RECORDS["start"] if kind == "resume" else ())])
        known = set(re.findall(r"\w+", text))
        assert set(data) <= known, kind
        always = set(re.findall(r"\w+", re.sub(r"\[\w+\]", "", " ".join(RECORDS[kind]))))
        assert always <= set(data), kind


def _sources() -> dict[Path, str]:
    return {path: path.read_text() for folder in ("fsdp2", "launchers") for path in (ROOT / folder).rglob("*.py")}


def test_each_variable_of_ours_is_listed() -> None:
    named = set(re.findall(r"FSDP2_[A-Z]+(?:_[A-Z]+)*", "\n".join(_sources().values()))) - {"FSDP2_"}
    assert named == {name for name in VARIABLES if name.startswith("FSDP2_")}


def _messages() -> str:
    """The text of every string in the code, with … for what is put in."""
    found = []
    for source in _sources().values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))  # type: ignore[misc]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_each_message_of_fix_it_is_one_of_the_code() -> None:
    """Also one that is put together of several strings: each part between … must be in one."""
    messages = _messages()
    rows = re.findall(r"^\| `([^`]+)` \|", (DOCS / "fix.md").read_text(), re.MULTILINE)
    assert len(rows) > 15
    for row in rows:
        for part in row.split("…"):
            assert part.strip() in messages, row


def test_minimal_is_explained_as_it_is() -> None:
    source = Path(str(minimal.__file__)).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / "minimal.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        assert block in source


def test_tabs_are_of_one_command_and_ray_takes_its_flags() -> None:
    pages = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert tabs(pages).count('=== "torchrun"') == tabs(pages).count('=== "Ray"') > 3
    for command in re.findall(r"^ +python -m launchers\.ray_train (.*)$", tabs(pages), re.MULTILINE):
        parse(shlex.split(command, comments=True), "launchers.ray_train")
    assert of_ray("torchrun --nproc_per_node 8 -m fsdp2.train -x") == "python -m launchers.ray_train --num-workers 8 -x"


def _cells(page: str, begin: str) -> list[str]:
    (line,) = re.findall(rf"^\| {re.escape(begin)}.*$", (DOCS / page).read_text(), re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("row", "side"),
    [
        ("a group for each block", "a minimal FSDP2 loop"),
        ("`--reshard-after-forward false`", "ours, no reshard"),
        ("`--shard-granularity 2`: half", "ours, 2 blocks a group"),
        ("`--shard-granularity root`: one group", "ours, one group |"),
        ("DDP: no parameters", "ours, DDP"),
    ],
)
def test_the_figures_of_speed_are_those_of_the_benchmark(row: str, side: str) -> None:
    _, ratio, peak = _cells("speed.md", row)
    _, _, measured, memory, _ = _cells("notes/step-benchmark.md", side)
    assert float(ratio) == pytest.approx(float(measured.split()[0]), abs=0.0051)  # rounded to two digits
    assert float(peak.removesuffix(" MB")) == pytest.approx(float(memory), abs=0.051)


def test_pages_begin_with_what_one_needs() -> None:
    """A heading, and then a command, a table or an answer within the first screen of forty lines."""
    for page in reference.DOCS.glob("*.md"):
        assert page.read_text().startswith("# "), page

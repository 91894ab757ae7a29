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
from tests.docs import commands, reference
from tests.docs.reference import DOCS, PAGES, RECORDS, ROOT, VARIABLES
from tests.docs.tabs import for_phones, of_ray, tabs


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_what_the_code_or_a_benchmark_has(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "python -m tests.docs.reference writes it again"


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--mixed-precision=fp16",
        "--model=transformer --model-size=debug --dataset=random-tokens --seq-len=16",
        "--async-checkpoint --checkpoint-every=2",
    ],
)
def test_each_field_of_a_record_is_explained(flags: str, train: Callable[..., Any]) -> None:
    events = [*train(*flags.split(), steps=4), *train(*flags.split(), steps=6)]
    assert {kind for kind, _ in events} >= {"start", "resume", "train", "eval", "checkpoint", "end"}
    for kind, data in events:
        text = " ".join([*RECORDS[kind], *(RECORDS["start"] if kind == "resume" else ())])
        known = set(re.findall(r"\w+", text))
        assert set(data) <= known, kind
        always = set(re.findall(r"\w+", re.sub(r"\[\w+\]", "", " ".join(RECORDS[kind]))))
        assert always <= set(data), kind


def _sources() -> dict[Path, str]:
    folders = [ROOT / name for name in ("fsdp2", "fsdp2_extra", "launchers")]
    return {path: path.read_text() for folder in folders for path in folder.rglob("*.py")}


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


def test_each_symptom_has_a_test_a_report_or_a_measured_table() -> None:
    rows = re.findall(r"^\|.*\|.*\|.*\|(.*)\|$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    proofs = [row for row in rows if row.strip() not in ("---", "test")]
    assert len(proofs) > 40
    for proof in proofs:
        assert re.fullmatch(r" (\[\^[\w-]+\]|\[there\]\(upstream\.md#.+\)|\[table\]\(notes/.+\)) ", proof), proof


def test_each_message_among_the_symptoms_is_one_of_the_code() -> None:
    """Also one that is put together of several strings: each part between … must be in one."""
    messages = _messages()
    rows = re.findall(r"^\| `([^`]+)` \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) > 15
    for row in rows:
        for part in row.split("…"):
            assert part.strip().removeprefix("fsdp2: ") in messages, row  # which `tell` puts before a notice


def test_nobody_is_told_to_install_from_an_index_what_is_in_none() -> None:
    root = DOCS.parent
    files = [root / "README.md", *DOCS.rglob("*.md")]
    files += [file for room in (*commands.ROOMS, "examples") for file in (root / room).rglob("*.py")]
    assert len(files) > 300
    assert [file for file in files if re.search(r"install\b[^\n]*fsdp2.reference", file.read_text())] == []


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


def test_a_phone_breaks_neither_short_code_nor_a_flag_and_gives_sentences_room() -> None:
    flag, sentence = (
        "python -m fsdp2.train --max-steps=3 --lora",
        "this is read in a row of words, and not in a column of them",
    )
    assert for_phones("<code>--keep 3</code>") == '<code class="unbroken">--keep 3</code>'
    assert re.findall(r'"unbroken">(.*?)</span>', for_phones(f"<code>{flag}</code>")) == ["--max-steps=3", "--lora"]
    block = "<pre><code>torchrun --nproc_per_node 2\n  -m fsdp2.train --run-dir runs/a\n</code></pre>"
    assert for_phones(block) == block, "whatever is copied stays as it is"
    assert for_phones("<td>yes</td>") == "<td>yes</td>"
    assert for_phones(f"<td>{sentence} <em>each</em></td>") == f'<td class="long">{sentence} <em>each</em></td>'


FIGURE = re.compile(r"(?<![\w.,-])\d[\d.,]*(?:–[\d.]+)? (?:ms|µs|kB|MB|GB|s|%)(?![\w/])")
# Of docs/speed.md's section on Llama 8B, whose first sentence says that nothing in it was measured.
ARITHMETIC = {
    "102 kB",
    "103–118 µs",
    "117–137 µs",
    "130.6 GB",
    "131.4 GB",
    "135.0 GB",
    "141 GB",
    "141.4 GB",
    "15 %",
    "2 %",
    "2 µs",
    "2.1 GB",
    "209 kB",
    "21–27 µs",
    "24 MB",
    "29.1 GB",
    "32.1 GB",
    "4 µs",
    "5 %",
    "5 µs",
    "54 GB",
    "55 %",
    "55–64 µs",
    "57–64 µs",
    "6 µs",
    "6.0 GB",
    "64 GB",
    "64 ms",
    "64.2 GB",
    "64–73 µs",
    "65 %",
    "68 %",
    "76–86 µs",
    "76–89 µs",
    "7–8 µs",
    "82–94 µs",
    "8–12 µs",
    "98 ms",
}
# Hand-written pages -> figures that nobody measured: limits, settings, sizes by arithmetic.
GIVEN = {
    "README.md": {"6.5 GB"},  # the size of a .venv, as docs/index.md has it
    "index.md": {"6.5 GB"},
    "troubleshooting.md": {"30 s"},
    "checkpoints.md": {"96.4 GB", "106.3 GB", "80 %"},  # by arithmetic, in tests/test_room.py
    "clusters.md": {"120 s", "30 s"},  # SLURM's settings
    "remote.md": {"8 s", "10 s", "30 s", "100 MB"},
    "state-dicts.md": {"4 GB", "12 GB"},
    "comparison.md": {"2 GB"},
    "speed.md": {"16 GB", "68 ms", "193 GB"} | ARITHMETIC,  # of one GPU
}
# These have tests of their own, or are made by a program as a whole.
OWN = re.compile(r"flags|run-directory|scale|benchmarks|migration|plan|models|upstream")


def _figures(page: Path) -> set[str]:
    written = r"<!-- table .*?<!-- end -->|<!-- (\w+): begin -->.*?<!-- \1: end -->"  # by a program
    text = re.sub(written, "", page.read_text(), flags=re.DOTALL)
    return set(FIGURE.findall(re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)))


def test_each_figure_of_a_page_is_one_of_a_page_of_results_or_of_the_log() -> None:
    """Tables come from `figures.TABLES`; a figure in a sentence must stand in a page of results, too."""
    results = "\n".join(page.read_text() for page in (DOCS / "notes").glob("*.md"))
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        if OWN.search(page.name) is None or page.name == "own-models.md":
            alone = {figure for figure in _figures(page) - GIVEN.get(page.name, set()) if figure not in results}
            assert not alone, f"{page.name}: {alone}"


def test_counts_of_architectures_are_those_of_their_table() -> None:
    rows = re.findall(
        r"^\| (\w+).* \| \d+ \| (\d+) \| (\d+) \(.*?\) \| (\d+) \|$", (DOCS / "models.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 6
    page = " ".join((DOCS / "own-models.md").read_text().split())
    for _, train, passed, _ in rows:
        assert f"{passed} of {train} " in page
    unequal = [int(passed) - int(equal) for _, _, passed, equal in rows]
    assert f"bit-equal except for {sum(unequal)} models, {unequal[2]} of them sequence to sequence" in page
    trained, right = (sum(int(row[column]) for row in rows[:5]) for column in (1, 2))
    timm = f"{rows[5][2]} of {rows[5][1]} of timm"
    assert f"{right} of {trained} of transformers, {timm}" in (ROOT / "README.md").read_text()


def test_pages_begin_with_what_one_needs() -> None:
    """A heading, and then a command, a table or an answer within the first screen of forty lines."""
    for page in reference.DOCS.glob("*.md"):
        assert page.read_text().startswith("# "), page

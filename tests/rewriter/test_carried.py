"""FSDP1's class, and models of it, that an object carries: what `check` finds of small programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from migration.rewriter.check import everything

HERE = Path(__file__).parent / "carried"


def programs(name: str) -> dict[str, dict[str, str]]:
    """By title: each file's text, by its name."""
    _, *parts = re.split(r"^=== (.*)\n", (HERE / f"{name}.txt").read_text(), flags=re.MULTILINE)
    found = {}
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        _, *files = re.split(r"^--- (.*)\n", text, flags=re.MULTILINE)
        found[title] = dict(zip(files[::2], files[1::2], strict=True))
    return found


def looked_at(files: dict[str, str], folder: Path) -> tuple[set[str], set[str], set[str]]:
    """The lines that a person marks, those that `check` does, and those on which it may."""
    wanted, allowed = set(), set()
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(re.sub(r" +#[!?]", "", text))
        for number, line in enumerate(text.splitlines(), 1):
            shown = f"{name}:{number}: {line.partition(' #')[0].strip()}"
            wanted |= {shown} if "  #!" in line else set()
            allowed |= {shown} if re.search(r"  #[!?]", line) else set()
    result = everything([str(folder)], texts=False)
    found = set()
    for finding in result.findings:
        name = str(Path(finding.file).relative_to(folder))
        line = files[name].splitlines()[finding.line - 1].partition(" #")[0].strip()
        found.add(f"{name}:{finding.line}: {line}")
    return wanted, found, allowed


CARRIED, ALIKE, LATER = programs("carried"), programs("alike"), programs("later")


@pytest.mark.parametrize("title", [*CARRIED, *ALIKE, *LATER])
def test_what_carries_fsdp1_is_found(title: str, tmp_path: Path) -> None:
    wanted, found, allowed = looked_at({**CARRIED, **ALIKE, **LATER}[title], tmp_path)
    assert (wanted - found, found - allowed) == (set(), set())

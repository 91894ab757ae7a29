"""Each code that is to be decided, or is refused, has a program in which it matters and one in which it stays away."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from migration.options import DECIDE, REFUSED, TABLE
from migration.rewriter.check import everything

_, *PARTS = re.split(r"^=== (FC\d\d)\n", Path(__file__).with_name("marks.txt").read_text(), flags=re.MULTILINE)
PROGRAMS = {code: text.split("--- not\n") for code, text in zip(PARTS[::2], PARTS[1::2], strict=True)}
HEAD = "import copy\nimport torch\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
ELSEWHERE = {
    "FC12",  # for readers of the table alone: with FSDP1, too, such a branch waits for ever
    "FC24",  # a file that can't be parsed: test_files.py
    *("FC38", "FC39"),  # of a program with a configuration, or of a library: test_libraries.py
}


def codes(program: str, folder: Path) -> set[str]:
    (folder / "program.py").write_text(HEAD + program)
    return {finding.code for finding in everything([str(folder)], texts=False).findings}


def test_each_code_has_its_programs() -> None:
    marks = {row.code for row in TABLE if row.code.startswith("FC") and row.status in (DECIDE, REFUSED)}
    assert marks - ELSEWHERE == PROGRAMS.keys()


@pytest.mark.parametrize("code", PROGRAMS)
def test_a_mark_is_there_where_it_matters_and_nowhere_else(code: str, tmp_path: Path) -> None:
    matters, not_there = PROGRAMS[code]
    assert code in codes(matters, tmp_path)
    assert code not in codes(not_there, tmp_path)

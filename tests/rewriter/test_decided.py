"""What the rewriter asks, and what one decides then: in.py is marked, out.py is written by hand, and both train alike.

Where FSDP1 did something by mistake, as the name of the pair says, their losses differ.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from migration.rewriter.check import account, load
from migration.rewriter.edits import KEPT
from migration.rewriter.rewrite import rewrite
from tests.harness import Ranks
from tests.rewriter.test_rules import DECIDED, NOT_BEFORE, both


def _statement(path: Path, line: int) -> range:
    """The lines of the innermost statement, without what a block holds, that a line belongs to."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if isinstance(body, list) else node.end_lineno or node.lineno
            if node.lineno <= line <= end:
                found = range(node.lineno, end + 1)
    return found


@pytest.mark.parametrize("pair", DECIDED, ids=lambda pair: pair.name)
def test_it_is_found_and_asked_and_gone_when_it_is_decided(pair: Path) -> None:
    codes = set(re.findall(r"F[A-Z]\d\d", pair.name))
    before, after = (load([str(pair / name)])[0] for name in ("in.py", "out.py"))
    text = (pair / "in.py").read_text().splitlines()
    found = [f for f in account(before) if f.code in codes and not text[f.line - 1].startswith("from ")]
    assert codes == {finding.code for finding in found}
    asked = {
        p.module.source.place(p.module.span(p.module.statement(p.node) or p.node)[0])[1]
        for p in rewrite(before).undecided
    }
    for finding in found:
        lines = _statement(pair / "in.py", finding.line)
        # FC18 goes on working where it stands, and so do the names of kinds.
        assert finding.status == KEPT or finding.code == "FC18" or asked & set(lines), "it was moved without a word"
    assert account(after) == []
    assert rewrite(after).files == []


def test_nothing_is_asked_where_the_interface_goes_on() -> None:
    """FC29 keeps it; tests/migrate/test_shim_programs.py trains on from ShardedTensors with it."""
    (pair,) = (one for one in DECIDED if one.name.startswith("FC29"))
    assert rewrite(load([str(pair / "in.py")])[0]).undecided == []


def test_what_is_decided_trains_as_before(ranks: Ranks, tmp_path: Path) -> None:
    for results in ranks.run(both, DECIDED, tmp_path, ranks=2, timeout=200):
        for name, (before, *rest) in results.items():
            assert len(before) >= 3, name
            if name in NOT_BEFORE:
                continue  # FSDP1 of this torch can't run it
            (after,) = rest
            assert (after == before) != name.endswith("-differs"), (name, before, after)
            assert after[0] == before[0], name

"""Each rule of the rewriter: in.py becomes out.py, both run on 2 ranks, and their losses are equal, bit by bit."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from migration.rewriter import interface
from migration.rewriter.check import account, load
from migration.rewriter.rewrite import rewrite
from migration.rewriter.source import INTERFACE
from migration.rewriter.symbols import BY_CODE
from tests.harness import Ranks
from tests.migrate.fsdp1_models import OLD, fsdp1_broadcasts_on_a_cpu
from tests.rewriter.code_page import WITHOUT, page

RULES_FOLDER = Path(__file__).parent / "rules"
RULES = sorted(RULES_FOLDER.iterdir())
DECIDED = sorted((RULES_FOLDER.parent / "decided").iterdir())
# FSDP1 no longer takes names of torch 1.11.
NOT_BEFORE = {"FX04-FX05-old-names"}
if OLD:
    NOT_BEFORE |= {
        rule.name for rule in (*RULES, *DECIDED) if re.search(r"F[DM]\d\d|FC1[01]", rule.name) if "state" in rule.name
    }
    NOT_BEFORE |= {"FM20-after-evaluation", "FM09-summon-full-params"}


def rewritten(path: Path) -> str:
    result = rewrite(load([str(path)])[0])
    assert [problem.why for problem in result.undecided] == []
    return result.files[0].data.decode() if result.files else path.read_text()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_what_becomes_of_it(rule: Path) -> None:
    assert rewritten(rule / "in.py") == (rule / "out.py").read_text()
    assert rewritten(rule / "out.py") == (rule / "out.py").read_text(), "a second time changes more"
    found = {finding.code for finding in account(load([str(rule / "in.py")])[0])}
    assert set(re.findall(r"F[A-Z]\d\d", rule.name)) <= found
    assert account(load([str(rule / "out.py")])[0]) == []


def both(rules: list[Path], folder: Path) -> dict[str, list[Any]]:
    """What the two programs of each rule give on this rank. `folder`: where the package is that some import."""
    with fsdp1_broadcasts_on_a_cpu(), mock.patch.object(sys, "path", [str(folder), *sys.path]):
        return {
            rule.name: [
                runpy.run_path(str(rule / name))["main"]()
                for name in ("in.py", "out.py")
                if name == "out.py" or rule.name not in NOT_BEFORE
            ]
            for rule in rules
        }


def put_interface(folder: Path) -> None:
    """The package that some programs get, where they import it from."""
    (folder / INTERFACE).mkdir()
    for name, text in interface.files().items():
        (folder / INTERFACE / name).write_text(text)


def test_both_give_the_same_losses(ranks: Ranks, tmp_path: Path) -> None:
    put_interface(tmp_path)
    for results in ranks.run(both, RULES, tmp_path, ranks=2, timeout=280):
        assert len(results) == len(RULES)
        for name, (before, *after) in results.items():
            assert len(before) >= 3, name
            assert after == ([before] if name not in NOT_BEFORE else []), name


def test_every_code_has_a_pair_or_a_reason() -> None:
    """test_scripts.py runs whole scripts before and after."""
    pairs = [pair / "in.py" for pair in (*RULES, *DECIDED)] + [*(RULES_FOLDER.parent / "scripts").glob("*.py")]
    found = {finding.code for path in pairs for finding in account(load([str(path)])[0])}
    assert found | set(WITHOUT) == set(BY_CODE)
    assert found & set(WITHOUT) == set()


def test_the_page_is_made_from_the_rules() -> None:
    path = Path(__file__).parent.parent.parent / "docs" / "migration-code.md"
    assert path.read_text() == page(), "python -m tests.rewriter.code_page > docs/migration-code.md"

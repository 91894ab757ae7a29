"""What the rewriter asks, and what one decides then: in.py is marked, out.py is written by hand, and both train alike.

Where FSDP1 did something by mistake, as the name of the pair says, their losses differ.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp2.migrate.code.check import load
from fsdp2.migrate.code.rewrite import rewrite
from fsdp2.migrate.code.survey import survey
from tests.harness import Ranks
from tests.migrate.test_rules import both

DECIDED = sorted((Path(__file__).parent / "decided").iterdir())


@pytest.mark.parametrize("pair", DECIDED, ids=lambda pair: pair.name)
def test_it_is_found_and_asked_and_gone_when_it_is_decided(pair: Path) -> None:
    codes = set(re.findall(r"F[A-Z]\d\d", pair.name))
    before, after = (load([str(pair / name)])[0] for name in ("in.py", "out.py"))
    assert codes <= {finding.code for finding in survey(before)}
    asked = {problem.code for problem in rewrite(before).undecided}
    assert codes - {"FC18"} <= asked, "it was moved without a word"  # FC18 goes on working where it stands
    assert survey(after) == []
    assert rewrite(after).files == []


def test_what_is_decided_trains_as_before(ranks: Ranks) -> None:
    for results in ranks.run(both, DECIDED, ranks=2, timeout=200):
        for name, (before, after) in results.items():
            assert len(before) >= 3, name
            assert (after == before) != name.endswith("-differs"), (name, before, after)
            assert after[0] == before[0], name

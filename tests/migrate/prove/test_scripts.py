"""Programs with FSDP1 and what the rewriter makes of them: bit-equal, or equal to rounding by a known cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp2.migrate.prove.cli import text, two
from tests.harness import Ranks
from tests.migrate.prove.in_pool import InPool
from tests.rewriter.test_scripts import OLD, SCRIPTS, moved

# Why they aren't bit-equal. The others are.
ROUNDED = {"trainer_class": "the norm's squares"}


@pytest.mark.parametrize("script", [one for one in SCRIPTS if one.name != "mnist.py"], ids=lambda one: one.stem)
def test_what_the_rewriter_makes_is_proven(
    ranks: Ranks, tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = (InPool(path, [], 2, 60, ranks) for path in (script, moved(script, tmp_path)))
    verdict = two(before, after, 4, tmp_path)
    print(text(verdict))
    assert verdict.status == 0

"""Programs with FSDP1 and what the rewriter makes of them: bit-equal, or equal to rounding by a known cause."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp2.migrate.prove.cli import text, two
from tests.harness import Ranks
from tests.migrate.prove.in_pool import InPool
from tests.rewriter.test_scripts import OLD, SCRIPTS, moved

# The others are bit-equal.
CLIPPED = "summed in another order"
ROUNDED = {
    "function_imports": "microbatches are added up in FSDP2's reduce_dtype",
    **dict.fromkeys(
        ("method_on_one_rank", "optional", "scaler_or_ddp", "table_of_strategies", "trainer_class", "transformer"),
        CLIPPED,
    ),
}


@pytest.mark.parametrize("script", [one for one in SCRIPTS if one.name != "mnist.py"], ids=lambda one: one.stem)
def test_what_the_rewriter_makes_is_proven(ranks: Ranks, tmp_path: Path, script: Path) -> None:
    if OLD and re.search(r"FULL_STATE_DICT|\.state_dict\(\)|summon_full_params", script.read_text()):
        pytest.skip("FSDP1 gathers to a CPU from torch 2.15 on")
    before, after = (InPool(path, [], 2, 60, pool=ranks) for path in (script, moved(script, tmp_path)))
    verdict = two(before, after, 4, tmp_path)
    print(text(verdict))
    assert verdict.status == 0
    assert ROUNDED.get(script.stem, "") in (verdict.cause or "")
    assert (verdict.verdict == "bit-equal") == (script.stem not in ROUNDED)

"""The known causes, each shown on a pair of programs, and what has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp2.migrate.prove.cli import text, two
from fsdp2.migrate.prove.compare import DIFFERENT, EQUAL, FAULT, ROUNDING, Verdict
from tests.harness import Ranks
from tests.migrate.prove.in_pool import InPool

PAIR = Path(__file__).parent / "pair"


def proven(ranks: Ranks, folder: Path, case: str) -> Verdict:
    before, after = (InPool(PAIR / f"{name}.py", [case], 2, 60, pool=ranks) for name in ("before", "after"))
    verdict = two(before, after, 4, folder)
    print(text(verdict))
    return verdict


@pytest.mark.parametrize(
    ("case", "verdict", "cause"),
    [
        ("plain", EQUAL, None),
        ("shared", ROUNDING, "several FSDPBlock get one input"),
        ("late-zero", FAULT, "SHARD_GRAD_OP with use_orig_params=True and zero_grad() between forward and backward"),
        ("hybrid", FAULT, "HYBRID_SHARD with shards of one rank never synchronises its replicas"),
        ("model-zero", DIFFERENT, "model.zero_grad() between forward and backward doesn't reach parameters"),
        ("rate", DIFFERENT, None),
        ("loss", DIFFERENT, None),
    ],
)
def test_the_cause_is_named(ranks: Ranks, tmp_path: Path, case: str, verdict: str, cause: str | None) -> None:
    found = proven(ranks, tmp_path, case)
    assert found.verdict == verdict
    assert cause is None or cause in (found.cause or "")
    assert found.status == (1 if verdict == DIFFERENT else 0)

"""Twelve and more programs with one fault each, all named, and the same ones without it, in which nothing is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp2.migrate.prove.cli import against_one
from tests.harness import Ranks
from tests.migrate.prove.in_pool import InPool

HERE = Path(__file__).parent
NAMED = {
    "batch_norm": "buffers",
    "buffer_never_set": "never-set",
    "dropped_samples": "dropped-samples",
    "gradients_kept": "kept-gradients",
    "loss_over_world": "factor",
    "loss_times_world": "factor",
    "lr_by_world": "settings",
    "mean_of_means": "gradients",
    "norm_by_hand": "norm-of-shards",
    "norm_of_shards": "norm-of-shards",
    "optimizer_before_sharding": "not-in-the-optimizer",
    "optimizer_of_shards": "updates",
    "past_the_wrapper": "drift",
    "repeated_samples": "repeated-samples",
    "same_data": "same-data",
    "weights_by_rank": "different-weights",
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("kind", ["faulty", "sound"])
def test_the_fault_is_named_and_none_without_it(ranks: Ranks, tmp_path: Path, kind: str, name: str) -> None:
    alone, several = (InPool(HERE / kind / f"{name}.py", [], count, 60, pool=ranks) for count in (1, 2))
    found = against_one(alone, several, 4, tmp_path)
    print(found.text())
    assert [fault.kind for fault in found.faults] == ([NAMED[name]] if kind == "faulty" else [])


def test_every_program_is_tried() -> None:
    for kind in ("faulty", "sound"):
        assert {path.stem for path in (HERE / kind).glob("*.py")} == set(NAMED)

"""The short form of `make chaos`: a few of its points, one of each kind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos import KINDS, Reference, check, prepare
from tests.chaos_rank import Point


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return prepare(tmp_path_factory.mktemp("chaos"))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return prepare(tmp_path_factory.mktemp("mesh"), KINDS["mesh"])


def _operation(reference: Reference, rank: int, wanted: str, **where: Any) -> Point:
    """The second time that a rank does this, if there is one, so that something is committed already."""
    moments = reference.moments[where.get("background", False), where.get("resumed", False), rank]["operation"]
    found = [number for number, moment in enumerate(moments, 1) if moment == wanted]
    return Point("operation", found[:2][-1], rank, **where)


POINTS = {
    "in a training step, one rank": lambda reference: Point("step", 4, rank=1),
    "half-way through a shard": lambda reference: _operation(
        reference, 1, "data __1_0.distcp", when="torn", both=True, background=True
    ),
    "before the marker": lambda reference: _operation(reference, 0, "write COMMIT.json.tmp", both=True),
    "while tensors are copied": lambda reference: Point("staging", 20, rank=0, background=True),
    "before the full model, where there is an older one": lambda reference: _operation(
        reference, 0, "create full-model.pt.tmp", resumed=True
    ),
    "while a run resumes": lambda reference: _operation(reference, 0, "open .metadata", resumed=True),
    "in a step, and the metrics are damaged after it": lambda reference: Point("step", 5, rank=0, damage="zeros"),
    "by a signal that lets one rank stand still": lambda reference: Point("step", 3, rank=1, fault="stop"),
    "by a disk that is full": lambda reference: _operation(
        reference, 1, "data __1_0.distcp", when="torn", fault="full"
    ),
    "by its folder's move": lambda reference: _operation(reference, 1, "create __1_0.distcp", fault="move"),
}


@pytest.mark.parametrize("where", POINTS)
def test_a_struck_run_loses_nothing_and_goes_on_bit_for_bit(reference: Reference, where: str) -> None:
    check(reference, POINTS[where](reference))


@pytest.mark.slow
def test_so_does_a_run_on_a_mesh(mesh: Reference) -> None:
    check(mesh, _operation(mesh, 3, "data __3_0.distcp", when="torn", background=True))

"""The rules of torch's CUDA allocator, on sequences whose result is known."""

from __future__ import annotations

import pytest

from fsdp2_tools.plan.allocator import reserved

MB = 1 << 20


@pytest.mark.parametrize(
    ("events", "default", "expandable"),
    [
        ([("a", 1, "x")], 2 * MB, 2 * MB),  # small ones share a segment
        ([("a", MB, "x"), ("b", MB, "x"), ("c", 1, "x")], 4 * MB, 4 * MB),
        ([("a", 3 * MB, "x")], 20 * MB, 20 * MB),
        ([("a", 11 * MB + 1, "x")], 12 * MB, 20 * MB),
        # What is freed is used again on its stream, and on no other.
        ([("a", 30 * MB, "x"), ("a", -1, ""), ("b", 30 * MB, "x")], 30 * MB, 40 * MB),
        ([("a", 30 * MB, "x"), ("a", -1, ""), ("b", 30 * MB, "y")], 60 * MB, 80 * MB),
        # A larger one needs a segment of its own, where an expandable segment grows.
        ([("a", 40 * MB, "x"), ("a", -1, ""), ("b", 60 * MB, "x")], 100 * MB, 60 * MB),
        # Two neighbours that are free are one block.
        (
            [("a", 20 * MB, "x"), ("b", 20 * MB, "x"), ("a", -1, ""), ("b", -1, ""), ("c", 40 * MB, "x")],
            80 * MB,
            40 * MB,
        ),
        # A hole that is too small stays.
        ([("a", 20 * MB, "x"), ("b", 20 * MB, "x"), ("a", -1, ""), ("c", 40 * MB, "x")], 80 * MB, 80 * MB),
    ],
)
def test_what_is_reserved(events: list[tuple[str, int, str]], default: int, expandable: int) -> None:
    assert reserved(events) == default
    assert reserved(events, expandable=True) == expandable

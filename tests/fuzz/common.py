"""What the fuzzers share: how many examples, and what a refusal looks like."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, settings

from fsdp2.checkpoint.refusal import LONGEST_REFUSAL

T = TypeVar("T")
# `python -m tests.fuzz` sets it: how many times the suite's examples, drawn at random.
TIMES = int(os.environ.get("FUZZ_TIMES", "0"))


def trials(count: int) -> settings:
    """The settings of a test that has `count` examples in the suite, the same each time."""
    return settings(
        max_examples=count * max(1, TIMES),
        derandomize=TIMES == 0,
        database=None,
        deadline=5000,  # milliseconds of one example: nothing takes a time that grows without end
        suppress_health_check=list(HealthCheck),  # examples that are large or slow to draw are meant
        print_blob=True,
    )


def refused(action: Callable[[], T], *refusals: type[Exception]) -> T | None:
    """What an action returns, or None if it raises one of the refusals in one printable line of bounded length."""
    try:
        return action()
    except refusals as error:
        one_line(str(error))
        return None


def one_line(text: str) -> None:
    assert text.isprintable(), ascii(text)  # half a character in a report ends both lanes
    assert 0 < len(text) < LONGEST_REFUSAL + 50, len(text)

"""A loss or a gradient norm that jumps: one step whose value is far above those of the steps before."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

REMEMBERED, FEWEST = 64, 32  # steps
# What is looked at: its name for users, and how often the median it is at least, if it jumps.
LOOKED_AT = {"loss": ("loss", 1.5), "grad_norm": ("gradient norm", 4.0)}
# Standard deviations of the logarithm, since both scatter in proportion to their size. The median absolute deviation
# estimates them, so that a jump doesn't hide the next one.
DEVIATIONS = 10 * 1.4826


class Jumps:
    """The logarithms of what the last steps had, and whether a value is far above them."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=REMEMBERED) for name in LOOKED_AT}
        self._high: dict[str, bool] = {}  # in the last step, so that a level that stays is told once

    def look(self, record: Mapping[str, Any]) -> tuple[str, str] | None:
        """The field of a `train` record that jumps, and a line about it; None if none does.

        Args:
            record: a value that isn't positive, or is no number, as fp16's overflows give and as a stranger's
                metrics.jsonl may hold, is passed over.
        """
        found = []
        for name, (words, times) in LOOKED_AT.items():
            value, recent = record.get(name), self._recent[name]
            if not (isinstance(value, (int, float)) and 0 < value < 1e308):
                continue
            usual, bound = _usual_and_bound(recent, times)
            high = value > bound
            if high and not self._high.get(name):
                last = f"{usual:.4g} is the median of the last {len(recent)} steps, and {bound:.4g} the bound"
                found.append((name, f"the {words} jumps to {value:.4g}; {last}"))
            self._high[name] = high
            recent.append(math.log(value))
        return found[0] if found else None


def _usual_and_bound(logs: deque[float], times: float) -> tuple[float, float]:
    if len(logs) < FEWEST:
        return math.nan, math.inf
    middle = statistics.median(logs)
    deviation = statistics.median(abs(one - middle) for one in logs)
    return math.exp(middle), math.exp(min(middle + max(math.log(times), DEVIATIONS * deviation), 700.0))

"""Advice from the numbers: two lines, drawn from them and from nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fsdp2.units import size
from fsdp2_tools.compare.measure import Measured


def efficient(found: Sequence[Measured]) -> list[Measured]:
    """The rows that no other beats in both memory and time."""
    good = [row for row in found if row.failed is None]

    def beaten(row: Measured) -> bool:
        return any(
            other.peak_bytes <= row.peak_bytes
            and step_ms(other) <= step_ms(row)
            and (other.peak_bytes, step_ms(other)) != (row.peak_bytes, step_ms(row))
            for other in good
        )

    return [row for row in good if not beaten(row)]


def step_ms(row: Measured) -> float:
    """A row's time for a step: the median over all repeats, in milliseconds."""
    return statistics.median(row.step_ms)


def advice(found: Sequence[Measured], budget: int) -> list[str]:
    """Name the row of least memory, and the fastest of those that fit in a `budget` of bytes for each rank."""
    good = [row for row in found if row.failed is None]
    if not good:
        return ["No row could be measured; the reasons are in the table."]
    least = min(good, key=lambda row: row.peak_bytes)
    fitting = [row for row in good if row.peak_bytes <= budget]
    if not fitting:
        return [
            f"Nothing fits in {size(budget)} a rank: {least.name} takes the least, {size(least.peak_bytes)}.",
            "Use more ranks, a smaller batch with more accumulation, or activation checkpointing, and compare again.",
        ]
    fastest = min(fitting, key=step_ms)
    lines = [f"Fits in {size(least.peak_bytes)} a rank with {least.name}, the least of {len(good)}."]
    text = f"Fastest that fits in {size(budget)} is {fastest.name}: {step_ms(fastest):.0f} ms a step"
    if fastest is not least:
        times, more = step_ms(least) / step_ms(fastest), fastest.peak_bytes / least.peak_bytes
        text += f", {times:.2f} times as fast as {least.name} with {more:.2f} times its memory"
    lines.append(text + ".")
    overlap = [row.name for row in fitting if row is not fastest and _quartiles(row)[0] <= _quartiles(fastest)[1]]
    if overlap:
        lines[-1] += f" Within the noise of this machine: {', '.join(overlap)}."
    return lines


def _quartiles(row: Measured) -> tuple[float, float]:
    if len(row.step_ms) < 2:
        return (row.step_ms[0], row.step_ms[0])
    first, _, third = statistics.quantiles(row.step_ms, n=4)
    return first, third

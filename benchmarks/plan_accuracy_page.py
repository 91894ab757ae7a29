"""The page docs/plan-accuracy.md, of points, for benchmarks/plan_accuracy.py."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from step_page import versions
from tables import machine

sys.path.insert(0, str(Path(__file__).parent.parent))

from fsdp2_tools.compare.report import markdown_table


@dataclass(frozen=True)
class Row:
    """A point, in bytes; `problem` says why there is none."""

    model: str
    flags: str
    ranks: int
    planned: int = 0
    with_gloo: int = 0
    phase: str = ""
    taken: tuple[int, ...] = ()  # by rank, by the ledger
    allocated: tuple[int, ...] = ()  # by rank, by torch's allocator
    problem: str = ""

    @property
    def most(self) -> int:
        return max(self.taken)

    @property
    def error(self) -> float:
        """The excess of the plan over what was taken, as a part of it; less is negative."""
        return self.planned / self.most - 1

    @property
    def beside_allocator(self) -> float:
        """The same, of the plan with gloo's buffers beside what the allocator gave: the plan shares no code with it."""
        return self.with_gloo / max(self.allocated) - 1


def page(rows: Sequence[Row], seconds: float) -> str:
    points = [row for row in rows if not row.problem]
    errors = [row.error for row in points]
    sizes = sorted(map(abs, errors))
    beside = [row.beside_allocator for row in points]
    under = [row for row in points if row.beside_allocator < 0]
    failed = [(row.model, f"`{row.flags or '(defaults)'}`", str(row.ranks), row.problem) for row in rows if row.problem]
    without = markdown_table(("model", "flags", "ranks", "why there is no point"), failed) if failed else "None."
    return f"""\
# How exact a plan of memory is

Written by `make plan-accuracy`. Each point is a training that was planned by `fsdp2.plan` and then run as gloo
processes on the CPU with `--memory-snapshot`, beside torch's profiler. Compared is the most that the fullest rank held.
A GPU has not been measured.

**Beside torch's CPU allocator**, which shares no code with a plan, a plan with its term for gloo's buffers is
{statistics.median(map(abs, beside)):.1%} off in the median, and {min(beside):+.1%} to {max(beside):+.1%} off. \
It is less than what was given out in {len(under)} of {len(points)} points. The data set is left out of both. A GPU has
no such term.

**Beside the ledger** of tensors that [memory.md](memory.md) describes, in steps and evaluation, the same plan without
gloo's term. Plan and run are counted by the same ledger here, so this shows that a plan executes what a run
executes. What the ledger can't see of either, it doesn't show.

- Points: {len(points)}; median error {statistics.median(sizes):.4%}, worst {max(errors, key=abs):+.3%}
- Equal to the byte: {sum(row.planned == row.most for row in points)}; within 1.5 %: \
{sum(size <= 0.015 for size in sizes)}; planned less than taken: {sum(one < 0 for one in errors)}, at most \
{-min(*errors, 0.0):.3%}
- "Fits" in one byte less than was taken: {sum(row.with_gloo < row.most for row in points)} times
- Rank 0 took the most in {sum(row.taken[0] == row.most for row in points)} of {len(points)}
- Date: {time.strftime("%Y-%m-%d")}; the last run of the script took {seconds:,.0f} s for what it measured
- Machine: {machine()}
- Versions: Python {platform.python_version()}, {", ".join(versions())}

![predicted against measured](plan-accuracy.png)

[plan.md](plan.md) says what a plan executes and what it can't see.

{table(points)}

## Without a point

{without}

"""


def of_meshes(rows: Sequence[Row]) -> str:
    """The section on tensor and sequence parallelism."""
    points = [row for row in rows if not row.problem]
    beside = [row.beside_allocator for row in points]
    failed = [f"- {row.model} `{row.flags}`: {row.problem}" for row in rows if row.problem]
    return f"""\
## Meshes: `--tp` and `--sp`

Written by `make plan-accuracy ARGS=--meshes`, in the same way: {len(points)} points on 4 ranks. Beside the ledger \
{sum(row.planned == row.most for row in points)} are equal to the byte, and the worst is \
{max((row.error for row in points), key=abs):+.3%} off. Beside the allocator, with gloo's buffers, plans are \
{statistics.median(map(abs, beside)):.1%} off in the median, and {min(beside):+.1%} to {max(beside):+.1%}: the term \
for gloo's buffers was found for one dimension, and is too small for two. A GPU has no such term. \
{time.strftime("%Y-%m-%d")}, {machine()}; {", ".join(versions())}.

{table(points)}
{chr(10).join(["", *failed])}
"""


def table(points: Sequence[Row]) -> str:
    """Points in Markdown."""
    head = ("model", "flags", "ranks", "planned, bytes", "taken, bytes", "error", "phase of the peak")
    cells = [
        (
            row.model,
            f"`{row.flags or '(defaults)'}`",
            str(row.ranks),
            f"{row.planned:,}",
            f"{row.most:,}",
            f"{row.error:+.3%}",
            row.phase,
            f"{row.beside_allocator:+.1%}",
        )
        for row in sorted(points, key=lambda row: (row.model, row.ranks, row.flags))
    ]
    return markdown_table((*head, "with gloo's buffers, beside the allocator"), cells)


def picture(rows: Sequence[Row], file: Path) -> None:
    """Planned against taken, and the errors."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.8))
    taken_, planned = [row.most / 1e6 for row in rows], [row.planned / 1e6 for row in rows]
    left.plot([min(taken_), max(taken_)], [min(taken_), max(taken_)], color="grey", lw=0.8)
    left.loglog(taken_, planned, ".", color="tab:blue", alpha=0.6)
    left.set(xlabel="taken, MB", ylabel="planned, MB")
    right.hist([100 * row.error for row in rows], bins=40, color="tab:blue")
    right.set(xlabel="error, %", ylabel="points", yscale="log")
    right.locator_params(axis="x", nbins=5)  # more of such long numbers run into each other
    figure.tight_layout()
    figure.savefig(file, dpi=110)

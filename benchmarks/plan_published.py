"""The distance between `fsdp2.plan`'s time and memory and what others have measured on GPUs: make plan-published

Each row of published.toml is planned with its configuration. `--fit` prints the efficiencies that suit the rows marked
`fit` best; the rows that aren't marked are the test.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

sys.path.insert(0, str(Path(__file__).parent.parent))

from published_page import memory, page, summary
from published_rows import ROOT, Row, executed, planned, read, rows, tables
from tables import write_within

from fsdp2.config import Config
from fsdp2.options.parser import Parser
from fsdp2.run.process import ending
from fsdp2_tools.plan.device import Gpu
from fsdp2_tools.plan.execute import STEPS, Runs
from fsdp2_tools.plan.work import COMPUTE, COPY_OUT, KERNEL, REDUCE_IN

PUBLISHED = Path(__file__).with_name("published.toml")
PAGE = ROOT / "docs" / "notes" / "plan-published.md"
ROWS = ROOT / "runs" / "plan-published.jsonl"
GIB = 2**30


def main() -> None:
    parser = Parser(prog="benchmarks/plan_published.py", allow_abbrev=False)
    parser.add_argument("--only", help="points whose source, GPU or shape has this in them; writes no page")
    parser.add_argument("--fit", action="store_true", help="fit efficiencies too; writes no page")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--rows", type=Path, default=ROWS, help="where plans are kept; those of other code are left")
    parser.add_argument("--kept", action="store_true", help="plan nothing more: the page of what is kept")
    command(parser.parse_args())


def command(given: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    content = read(PUBLISHED)
    gpus = tables(content["gpus"])
    points = [
        point
        for point in content["point"]
        if (given.only or "") in f"{point['source']} {point['gpu']} {point['shape']}"
        and (not given.fit or point.get("fit"))
    ]
    if given.fit:
        fit(points, content["shapes"], gpus)
        return
    found = []
    for row in rows(points, content["shapes"], gpus, given.rows, more=not given.kept):
        print(line(row), flush=True)
        found.append(row)
    found.sort(key=lambda row: points.index(row.point))
    if found:
        print("\n".join(summary(found)))
    if found and not given.only:
        there = [row.point for row in found]
        write_within(given.page, *page(found, [point for point in points if point not in there]), like=PAGE)


def line(row: Row) -> str:
    point, plan = row.point, row.planned
    return (
        f"{point['gpu']:16} {point['ranks']:4} {point['shape']:12} {plan.tokens:8,.0f} of {point['tokens']:8,} "
        f"{row.error:+7.1%} {'' if row.inside else 'outside'} exposed {plan.exposed_ms / plan.milliseconds:.0%} "
        f"idle {plan.idle_ms / plan.milliseconds:.0%} {row.used / GIB:.1f} GiB {memory(row)} "
        f"{point.get('apart', '')} {'(fit)' * point.get('fit', False)}"
    )


# What a fit tries.
GRID = {
    "matrix": [x / 100 for x in range(44, 92, 2)],
    "attention": [x / 100 for x in range(14, 72, 3)],
    "memory": [x / 100 for x in range(45, 96, 5)],
}


@dataclass(frozen=True)
class Executed:
    """A point with its executions, for a fit."""

    point: Mapping[str, Any]
    config: Config
    runs: Runs
    gpu: Gpu


def fit(points: Sequence[Mapping[str, Any]], shapes: Mapping[str, Any], gpus: Mapping[str, Gpu]) -> None:
    """Print for each kind of GPU the efficiencies that leave the least sum of squared errors, all others as they are.

    Only the computation is fitted: in the points for it exchanges are hidden.
    """
    done = []
    with tempfile.TemporaryDirectory() as folder:
        for point in points:
            done.append(Executed(point, *executed(point, shapes, Path(folder)), gpus[point["gpu"]]))
            plan = planned(point, done[-1].config, done[-1].runs, done[-1].gpu)
            print(line(Row(point, plan, done[-1].gpu.memory)), flush=True)
    for kind in dict.fromkeys(point["gpu"].split("-")[0] for point in points):
        some = [(row, operators(row)) for row in done if row.point["gpu"].split("-")[0] == kind]
        best = min(
            (sum(math.log1p(off(row, table, values)) ** 2 for row, table in some), values)
            for values in itertools.product(*GRID.values())
        )[1]
        errors = ", ".join(f"{row.point['shape']} {off(row, table, best):+.1%}" for row, table in some)
        print(kind, dict(zip(GRID, best, strict=True)), errors)


def operators(row: Executed) -> Any:
    """A row for each operator of the computation of a step: FLOPs, bytes, how often, and 0 to 2 by what bounds it."""
    found = []
    for done, times in ((row.runs.longer, 1 + row.runs.times), (row.runs.short, -row.runs.times)):
        if done is None:
            continue
        phases = done.timeline.phases
        starts = [i for i, phase in enumerate(phases) if (phase.step, phase.name) == (STEPS, "forward")]
        for work in done.work:
            phase = phases[work.phase]
            if phase.step == STEPS and phase.name != "evaluation" and work.role in (COMPUTE, COPY_OUT, REDUCE_IN):
                again = max(1, row.config.grad_accumulation - 2)
                often = again if len(starts) == 3 and starts[1] <= work.phase < starts[2] else 1
                assert row.gpu.speed is not None
                seconds = work.flops / row.gpu.speed.flops[work.dtype]
                found.append((seconds, work.bytes / row.gpu.speed.memory, often * times, list(GRID).index(work.kind)))
    return numpy.array(found, dtype=float)


def off(row: Executed, table: Any, values: Sequence[float]) -> float:
    """The error of tokens/s with these efficiencies, as a part."""
    seconds, moved, often, kind = table.T
    computed = seconds / numpy.choose(kind.astype(int), values)
    total = (numpy.maximum(numpy.maximum(computed, moved / values[2]), KERNEL) * often).sum()
    config = row.config
    return float(config.batch_size * config.grad_accumulation * config.seq_len / total / row.point["tokens"] - 1)


if __name__ == "__main__":
    with ending.exit_status():
        main()

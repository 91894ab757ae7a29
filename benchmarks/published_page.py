"""The page that `make plan-published` writes: how far plans are off, by source and GPU, and every point."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from published_rows import Row

from fsdp2_tools.compare.report import markdown_table

GIB = 2**30
COMMON = ("--mixed-precision=bf16", "--optimizer=adamw", "--clip-grad-norm")


def page(rows: Sequence[Row], missing: Sequence[Mapping[str, Any]] = ()) -> tuple[str, str, str]:
    """The parts of the page that follow from its points; `missing` are those that it names as not planned yet."""

    def cells(row: Row) -> tuple[str, ...]:
        point, plan = row.point, row.planned
        role = "not counted" if "apart" in point else next((one for one in ("fit", "blind") if point.get(one)), "test")
        notes = [*point.get("ways", ()), *([f"{point['apart']} is left out"] if "apart" in point else [])]
        exposed = plan.exposed_ms / plan.milliseconds
        numbers = (f"{plan.tokens:,.0f}", f"{point['tokens']:,}", f"{row.error:+.1%}", f"{exposed:.0%}")
        ran = (point["gpu"], str(point["ranks"]), point["shape"], f"`{shown(row)}` {'; '.join(notes)}".strip())
        return (*ran, *numbers, role, f"{row.used / GIB:.1f}", memory(row))

    head = ("GPU", "ranks", "model", "flags", "planned tokens/s a GPU", "published", "error", "exposed", "role")
    head += ("GiB on the device", "GiB planned of published")
    newer = [row for row in rows if row.point["gpu"].startswith("h200")]
    waiting = max(row.planned.exposed_ms / row.planned.milliseconds for row in newer)
    sources = "\n".join(f"- {source}" for source in dict.fromkeys(row.point["source"] for row in rows))
    summary_lines = "\n".join([*summary(rows), *left(rows, missing)])
    first = f"""\
{summary_lines}
- Date: {time.strftime("%Y-%m-%d")}
- Versions: torch {torch.__version__}; the published runs used those of their time, 2023 to 2026"""
    errors = [f"{row.error:+.1%} ({row.point['shape']}, {row.point.get('apart', 'eager')})" for row in newer]
    second = f"""\
The errors of its {len(newer)} points are {", ".join(errors)}. At most {waiting:.0%} of
a planned step waits for exchanges, and the eager point asks for rates that are {needed(newer):.2f} times as high."""
    third = f"""\
{above(rows)}

## Sources

{sources}

## Every point

{markdown_table(head, [cells(row) for row in rows])}"""
    return first, second, third


def left(rows: Sequence[Row], missing: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of a command that was stopped: which points it lacks, in no figure of the page."""
    if not missing:
        return []
    names = ", ".join(f"{name} ({count})" for name, count in Counter(point["shape"] for point in missing).items())
    return [
        f"- **{len(missing)} of {len(rows) + len(missing)} points weren't planned** before the command was stopped, "
        f"and are in none of these figures: {names}. `make plan-published` goes on with them"
    ]


def summary(rows: Sequence[Row]) -> list[str]:
    """The plans' errors: of the blind test, of all points that weren't fitted, and by source and GPU."""
    counted = [row for row in rows if "apart" not in row.point]
    tests = [row for row in counted if not row.point.get("fit")]
    blind = [row for row in tests if row.point.get("blind")]
    found = [
        f"- Points: {len(counted)}; {len(counted) - len(tests)} for the fit, {len(tests)} to test it, "
        f"of which {len(blind)} are blind: chosen by a rule when the fit was closed",
    ]
    for name, some in (("Blind test", blind), ("All test points", tests)):
        if some:
            found.append(f"- {name}: {errors(some)}")
    for name, some in (
        ("Memory, of the points that publish theirs", [row for row in counted if "gib" in row.point]),
        (
            "Memory, with those that use `torch.compile`, which isn't planned",
            [row for row in rows if "gib" in row.point],
        ),
    ):
        if some:
            found.append(f"- {name}: {memory_errors(some)}")
    over = sum(row.used > row.card for row in rows)
    found.append(
        f"- Points that plan more than the card that ran them has, by the planner's table: {over} of {len(rows)}"
    )
    right = pairs(tests)
    found.append(
        f"- Pairs of test points of one model, GPU and source that differ by more than 5 %: {len(right)}, of which "
        f"{sum(right)} are planned in the right order"
    )
    for key, name in (("source", "By source"), ("gpu", "By GPU")):
        found.append(f"- {name}, test points:")
        groups = dict.fromkeys(row.point[key] for row in tests)
        found += [f"    - {group}: {errors([row for row in tests if row.point[key] == group])}" for group in groups]
    return found


def errors(rows: Sequence[Row]) -> str:
    """Of tokens/s: how large they are, whether they lie on one side, and whether the order of points is right."""
    sizes = [abs(row.error) for row in rows]
    worst = max((row.error for row in rows), key=abs)
    order = f", rank correlation {spearman(rows):.3f}" if len(rows) > 2 else ""
    return (
        f"{len(rows)} points, median error {statistics.median(sizes):.1%}, mean "
        f"{statistics.mean(row.error for row in rows):+.1%}, worst {worst:+.1%}, within 15 %: "
        f"{sum(size <= 0.15 for size in sizes)}, in the planned range: {sum(row.inside for row in rows)}{order}"
    )


def memory_errors(rows: Sequence[Row]) -> str:
    """Of the memory of points that publish theirs: how large they are, and on which side."""
    found = [row.memory_error for row in rows if row.memory_error is not None]
    return (
        f"{len(found)} points, median error {statistics.median(map(abs, found)):.1%}, "
        f"mean {statistics.mean(found):+.1%}, worst {max(found, key=abs):+.1%}"
    )


def memory(row: Row) -> str:
    """A source's own figure of memory beside the planned one of the same kind; nothing if it has none."""
    error = row.memory_error
    if error is None:
        return ""
    kind, plan = row.point["gib_is"], row.planned
    like = plan.allocated if kind == "allocated" else plan.reserved
    return f"{kind} {like / GIB:.1f} of {row.point['gib']} ({error:+.1%})"


def pairs(rows: Sequence[Row]) -> list[bool]:
    """True if the order is right, for two settings of a model: models of different sizes are easily told apart."""
    return [
        (one.planned.tokens > other.planned.tokens) == (one.point["tokens"] > other.point["tokens"])
        for one, other in itertools.combinations(rows, 2)
        if all(one.point[key] == other.point[key] for key in ("shape", "gpu", "source"))
        and abs(math.log(one.point["tokens"] / other.point["tokens"])) > math.log(1.05)
    ]


def spearman(rows: Sequence[Row]) -> float:
    """Of the order of configurations by tokens: 1 if planned and measured are the same."""
    return statistics.correlation(
        ranks_of([r.planned.tokens for r in rows]), ranks_of([r.point["tokens"] for r in rows])
    )


def ranks_of(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    found = [0.0] * len(values)
    for rank, index in enumerate(order):
        found[index] = rank
    return found


def above(rows: Sequence[Row]) -> str:
    """Points that plan more than the card that ran them has, each with how much and of what."""
    over = [row for row in rows if row.used > row.card]
    if not over:
        return "None."

    def cells(row: Row) -> tuple[str, ...]:
        kinds = sorted(row.planned.kinds.items(), key=lambda kind: -kind[1])[:2]
        most = ", ".join(f"{name} {size / GIB:.1f}" for name, size in kinds)
        holes = (row.planned.reserved - row.planned.allocated) / GIB
        why = (
            f"{row.used / row.card - 1:.1%} or more too high, since it ran: tensors {most}; the allocator's "
            f"holes {holes:.1f}; beside it {row.planned.beside / GIB:.1f}"
        )
        numbers = (f"{row.used / GIB:.1f}", f"{row.card / GIB:.1f}")
        return (row.point["gpu"], str(row.point["ranks"]), row.point["shape"], f"`{shown(row)}`", *numbers, why)

    head = ("GPU", "ranks", "model", "flags", "GiB planned", "the card's", "why")
    return markdown_table(head, [cells(row) for row in over])


def needed(rows: Sequence[Row]) -> float:
    """By how much the rates would have to be higher for the points that aren't apart, on average."""
    return statistics.mean(1 / (1 + row.error) for row in rows if "apart" not in row.point)


def shown(row: Row) -> str:
    """Flags of a point but those that all have."""
    return " ".join(flag for flag in row.point["flags"].split() if not flag.startswith(COMMON))

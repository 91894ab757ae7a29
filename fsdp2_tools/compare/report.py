"""The comparison as tables: for the terminal, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from fsdp2.units import size
from fsdp2_tools.compare.advice import efficient, step_ms
from fsdp2_tools.compare.measure import Measured

HEADINGS: tuple[str, ...] = ("variant", "ranks", "loss", "losses", "step, ms", "samples/s", "peak memory")
HEADINGS += ("checkpoint", "save, s", "load, s")


def cells(found: Sequence[Measured]) -> list[list[str]]:
    """A line of text for each row; a failed one has its reason after its name."""
    reference = next((row for row in found if row.failed is None), None)
    best = efficient(found)
    table = []
    for row in found:
        if row.failed is not None:
            table.append([row.name, f"failed: {row.failed}"])
            continue
        assert reference is not None
        low, high = min(row.step_ms), max(row.step_ms)
        table.append(
            [
                row.name + (" *" if row in best else ""),
                str(row.ranks),
                f"{row.losses[-1]:.6f}",
                equality(row, reference),
                f"{step_ms(row):.1f} ({low:.1f}–{high:.1f})",
                f"{1000 * row.samples / step_ms(row):.0f}",
                size(row.peak_bytes) + (f" of {size(row.reserved_bytes)} reserved" if row.reserved_bytes else ""),
                size(row.checkpoint_bytes),
                f"{statistics.median(row.save_seconds):.2f}",
                f"{row.load_seconds:.2f}",
            ]
        )
    return table


def equality(row: Measured, reference: Measured) -> str:
    """`equal` if each loss is the reference's, bit for bit; else the first step that differs, and the most."""
    if row is reference:
        return "reference"
    pairs = list(zip(row.losses, reference.losses, strict=True))
    different = [step for step, (a, b) in enumerate(pairs, 1) if repr(a) != repr(b)]  # two that are NaN are alike
    if not different:
        return "equal"
    largest = max((abs(a - b) for a, b in pairs if math.isfinite(a - b)), default=math.nan)
    return f"from step {different[0]}, {largest:.1e}"


def terminal(headings: Sequence[str], table: Sequence[Sequence[str]]) -> str:
    """A table for a terminal; a line that is shorter than the headings runs on past its columns."""
    every = [headings, *table]
    whole = [line for line in every if len(line) == len(headings)]
    widths = [max(len(line[i]) for line in whole) for i in range(len(headings))]
    widths[0] = max(len(line[0]) for line in every)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in every
    )


def markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [
        list(headings),
        ["---"] * len(headings),
        *(list(line) + [""] * (len(headings) - len(line)) for line in lines),
    ]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def memory_table(found: Sequence[Measured]) -> str:
    """Bytes by kind at the peak, as Markdown."""
    good = [row for row in found if row.failed is None]
    kinds = list(dict.fromkeys(kind for row in good for kind in row.by_kind))
    lines = [[row.name, size(sum(row.by_kind.values()))] + [size(row.by_kind.get(k, 0)) for k in kinds] for row in good]
    return markdown_table(["variant", "at the peak", *kinds], lines)


def exchange_table(found: Sequence[Measured]) -> str:
    """Collectives of a step, counts and bytes, as Markdown."""
    good = [row for row in found if row.failed is None]
    names = list(dict.fromkeys(name for row in good for name in row.exchanges))

    def cell(row: Measured, name: str) -> str:
        count, amount = row.exchanges.get(name, (0, 0))
        return f"{count}, {size(amount)}" if count else "none"

    return markdown_table(["variant", *names], [[row.name, *(cell(row, name) for name in names)] for row in good])


def as_csv(found: Sequence[Measured]) -> str:
    """A row a variant."""
    kinds = list(dict.fromkeys(kind for row in found for kind in row.by_kind))
    names = list(dict.fromkeys(name for row in found for name in row.exchanges))
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(
        ["variant", "ranks", "failed", "loss", "step_ms_median", "step_ms_min", "step_ms_max", "samples_per_second"]
        + ["peak_bytes", "reserved_bytes", *(f"{kind} bytes" for kind in kinds)]
        + [f"{name} {what}" for name in names for what in ("count", "bytes")]
        + ["checkpoint_bytes", "save_seconds", "load_seconds"]
    )
    for row in found:
        if row.failed is not None:
            writer.writerow([row.name, row.ranks, row.failed])
            continue
        writer.writerow(
            [row.name, row.ranks, "", row.losses[-1], step_ms(row), min(row.step_ms), max(row.step_ms)]
            + [1000 * row.samples / step_ms(row), row.peak_bytes, row.reserved_bytes]
            + [row.by_kind.get(kind, 0) for kind in kinds]
            + [value for name in names for value in row.exchanges.get(name, (0, 0))]
            + [row.checkpoint_bytes, statistics.median(row.save_seconds), row.load_seconds]
        )
    return out.getvalue()


def as_json(found: Sequence[Measured], facts: dict[str, Any], lines: Sequence[str]) -> str:
    """Everything that was measured."""
    rows = [dataclasses.asdict(row) for row in found]
    for row in rows:
        row["losses"] = [loss if math.isfinite(loss) else None for loss in row["losses"]]
    best = [row.name for row in efficient(found)]
    return json.dumps({"facts": facts, "rows": rows, "efficient": best, "advice": list(lines)}, indent=1) + "\n"


def as_markdown(found: Sequence[Measured], facts: dict[str, Any], lines: Sequence[str]) -> str:
    """The page of a comparison."""
    said = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    return f"""# Comparison

{said}

{markdown_table(HEADINGS, cells(found))}

\\* no other row is both as fast and as small. A step's time is the median of all repeats, with the least and the
largest; memory is that of the rank that has the most; losses are compared with the first row's, step by step and bit
by bit.

{chr(10).join(lines)}

## Memory at the peak, by kind

{memory_table(found)}

## What a rank exchanges in a step

{exchange_table(found)}
"""

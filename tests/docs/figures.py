"""Tables of measured figures in hand-written pages: each is made from the page of results that a benchmark wrote.

`python -m tests.docs.reference` writes what stands between `<!-- table NAME -->` and `<!-- end -->` of a page, and a
test compares it, so that two pages can't have two numbers for one thing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
NOTES = DOCS / "notes"

STEP, SAVERS, SAVE, RAY = (f"{name}-benchmark.md" for name in ("step", "savers", "checkpoint", "ray"))

Row = dict[str, str]


def results(name: str, first: str, column: str = "") -> dict[str, Row]:
    """Of the page's first table that has a row of that name, and that column: row -> column -> text."""
    text = (NOTES / name).read_text()
    for found in re.findall(r"^\|.*\n\|[ :|-]+\n(?:\|.*\n?)+", text, re.MULTILINE):
        head, _, *lines = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in found.splitlines())
        rows = {line[0].removesuffix(" *"): dict(zip(head, line, strict=True)) for line in lines}
        if first in rows and (not column or column in head):
            return rows
    raise KeyError(f"{name} has no row {first}")


def value(text: str) -> float:
    """The number that a cell begins with."""
    return float(text.split()[0].replace(",", ""))


def rounded(text: str, digits: int = 2) -> str:
    """A cell's numbers, median and spread, with fewer digits."""
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.{digits}f}", text)


def table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _steps(sides: Mapping[str, str], reference: str) -> list[list[str]]:
    time, peak = "of the minimal loop's", "peak of tensors, MB a rank"
    found = results(STEP, reference)
    return [
        [
            label,
            f"{value(found[side][time]) / value(found[reference][time]):.2f}",
            f"{value(found[side][peak]):.1f} MB",
        ]
        for side, label in sides.items()
    ]


def strategies() -> str:
    """Time and memory of each strategy, beside FSDP2's."""
    sides = {
        "ours": "`fsdp2`",
        "ours, FSDP1": "`fsdp1`",
        "ours, DDP": "`ddp`",
        "ours, ZeRO-1": "`zero1`",
        "ours, ZeRO-2": "`zero2`",
        "ours, ZeRO-3": "`zero3`",
    }
    return table(["strategy", "time of a step ÷ FSDP2's", "peak of a rank"], _steps(sides, "ours"))


def groups() -> str:
    """The time that fewer groups save, and their memory."""
    sides = {
        "a minimal FSDP2 loop": "a group for each block, resharded after forward",
        "ours, no reshard": "`--reshard-after-forward false`: no all-gather in backward",
        "ours, 2 blocks a group": "`--shard-granularity 2`: half as many groups",
        "ours, one group": "`--shard-granularity root`: one group",
        "ours, DDP": "DDP: no parameters gathered, gradients summed in place",
    }
    return table(["", "of the minimal loop's step", "peak of a rank"], _steps(sides, "a minimal FSDP2 loop"))


def savers() -> str:
    """Memory and collectives of FSDP2 with each saver."""
    memory, exchanged = results(SAVERS, "fsdp2 bf16"), results(SAVERS, "fsdp2 bf16", column="all-gather")
    flags = {
        "fsdp2": "none",
        "fsdp2 no-reshard": "`--reshard-after-forward false`",
        "fsdp2 reshard": "`--reshard-after-forward true`",
        "fsdp2 root": "`--shard-granularity root`",
        "fsdp2 bf16": "`--mixed-precision bf16`",
        "fsdp2 fp16": "`--mixed-precision fp16`",
        "fsdp2 recompute": "`--activation-checkpointing`",
        "fsdp2 all": "fp16, offload and resharding of the root together",
    }
    of_memory, of_exchange = ("at the peak", "activations", "gathered parameters"), ("all-gather", "reduce-scatter")
    return table(
        ["flag", *of_memory, *of_exchange],
        [
            [label, *(memory[row][name] for name in of_memory), *(exchanged[row][name] for name in of_exchange)]
            for row, label in flags.items()
        ],
    )


def saves() -> str:
    """What a save costs."""
    found = results(SAVE, "ours, asynchronous")
    sides = {
        "ours": "synchronous, hashed, all synced",
        "dcp.save": "`dcp.save`, which hashes nothing",
        "ours, asynchronous": "`--async-checkpoint`",
        "torch_checkpointing": "torch_checkpointing",
        "dcp.async_save, kept stager in a thread": "`dcp.async_save` with a kept `DefaultStager` in a thread",
        "dcp.async_save": "`dcp.async_save`",
    }
    columns = {"stall, both": "training waits, s", "durable": "durable after, s"}
    return table(
        ["a save", *columns.values()],
        [[label, *(rounded(found[side][column]) for column in columns)] for side, label in sides.items()],
    )


def ray() -> str:
    """A run through Ray beside one under torchrun."""
    found = results(RAY, "whole run, s")
    rows = ("whole run, s", "until the header, s", "step, ms", "after the last line, s")
    return table(
        ["", "torchrun", "Ray", "Ray ÷ torchrun"],
        [[row, *(rounded(found[row][column], 1) for column in ("torchrun", "ray")),
          rounded(found[row]["ray / torchrun"])] for row in rows],
    )  # fmt: skip


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "comparison.md": {"strategies": strategies, "savers": savers},
    "speed.md": {"groups": groups},
    "checkpoints.md": {"saves": saves},
    "ray.md": {"ray": ray},
}


def filled(page: str) -> str:
    """The page with each of its tables made again."""
    text = (DOCS / page).read_text()
    for name, make in TABLES[page].items():
        begin, end = f"<!-- table {name} -->\n", "<!-- end -->"
        assert text.count(begin) == 1, f"{page}: {name}"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    return text

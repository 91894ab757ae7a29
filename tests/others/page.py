"""docs/models.md, from the rows of `tests.others.table`."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tests.others.sections import kept

if TYPE_CHECKING:
    from tests.others.table import Row

NOT_COMPARED = (
    "Not compared, since the plain library doesn't train what a small configuration makes of it, or a run refuses it:"
)
LOSSES = 1e-5  # relative; where it isn't bit for bit, sums are made in another order
KINDS = {
    "causal": "Causal language models of transformers",
    "masked": "Masked language models of transformers",
    "seq2seq": "Sequence to sequence models of transformers",
    "image": "Image classification models of transformers",
    "audio": "Audio classification models of transformers",
    "timm": "Image models of timm",
}


def passed(row: Row) -> bool:
    """Whether all that a plain model does is done here, and the same."""
    in_bf16 = _close(row.bf16) or not row.plain_bf16
    recomputed = row.checkpointed or not row.plain_recompute
    found = row.started and _close(row.apart) and row.resumed and recomputed and in_bf16 and row.exported
    return not row.failed and bool(found)


def _close(gap: float | None) -> bool:
    return gap is not None and gap <= LOSSES


def page(rows: Sequence[Row]) -> str:
    """The page, of any number of rows; the last of an architecture counts."""
    rows = list({(row.kind, row.name): row for row in rows}.values())
    return "\n".join([*_head(rows), *_tables(rows)])


def _head(rows: Sequence[Row]) -> list[str]:
    lines = [
        "# Models of transformers and timm, one by one",
        "",
        f"`make models` writes this page ({sum(row.seconds for row in rows) / 60:.0f} minutes on {_machine()}). Last:",
        f"{datetime.date.today()}, {versions()}, two gloo ranks. Every model is tiny; no line of `fsdp2/` is",
        "particular to one of them. Models of audio stand behind a function of one's own, which makes what they hear",
        "of pictures: `tests/others/audio.py`.",
        "",
        kept("published"),
        "",
        kept("splits"),
        "",
        "## All that the libraries know",
        "",
        "| | known | compared with the plain library | pass here | losses bit for bit |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind, title in KINDS.items():
        mine = [row for row in rows if row.kind == kind]
        trains, good = [row for row in mine if row.plain], [row for row in mine if passed(row)]
        equal = sum(row.apart == 0.0 for row in good)
        share = f"{len(good)} ({100 * len(good) / len(trains):.1f} %)" if trains else "0"
        lines.append(f"| {title} | {len(mine)} | {len(trains)} | {share} | {equal} |")
    lines += [
        "",
        "What the columns say:",
        "",
        "A model passes with yes in each of them. Recomputation and bf16 count where the plain library has them.",
        "",
        "- *groups*: on how many sets of modules `fully_shard` was called, the root included.",
        "- *start*: every parameter and buffer, also one that no state dict holds, is on both ranks that of the plain",
        "  model before the first step. Memory is NaN until it is set.",
        "- *losses*: five steps on two ranks beside a plain loop of the library in one process: `=` is bit for bit, a",
        "  number is the largest relative difference.",
        "- *resume*: steps 4 and 5 from the checkpoint of step 3, bit for bit. *recompute*: all five with",
        "  `--activation-checkpointing`, bit for bit.",
        "- *bf16*: all five with `--mixed-precision` beside a plain loop that rounds its fp32 weights to bf16 for each",
        "  forward; as for losses.",
        "- *export*: a process without this package loads what was exported, a model of transformers by",
        "  `from_pretrained`, and each tensor is that of the run, bit for bit.",
        "- *weights*: the largest difference of a parameter that it loads from one that the plain loop has trained.",
        "  Adam divides by the size of a gradient: where that is rounding alone, the step isn't.",
        "",
    ]
    return lines


def _tables(rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    for kind, title in KINDS.items():
        mine = sorted((row for row in rows if row.kind == kind), key=lambda row: row.name)
        if not mine:
            continue
        lines += [f"## {title}", ""]
        if tried := [row for row in mine if row.plain]:
            lines += [
                "| | parameters | groups | start | losses | resume | recompute | bf16 | export | weights | |",
                "|---|---:|---:|---|---|---|---|---|---|---|---|",
                *map(_line, tried),
                "",
            ]
        if others := [row for row in mine if not row.plain]:
            lines += [NOT_COMPARED, ""]
            lines += [*(f"- {row.name}: {text(row.failed)}" for row in others), ""]
    return lines


def _line(row: Row) -> str:
    cells: list[Any] = [row.name, f"{row.parameters:,}", row.groups or "", _yes(row.started), _gap(row.apart)]
    why = "; ".join(filter(None, (row.failed, *row.notes)))
    cells += [_yes(row.resumed), _yes(row.checkpointed), _gap(row.bf16), _yes(row.exported)]
    cells += [_gap(row.trained), text(why)]
    return "| " + " | ".join(map(str, cells)) + " |"


def _machine() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"


def versions() -> str:
    import timm
    import transformers

    return f"transformers {transformers.__version__}, timm {timm.__version__}, torch {torch.__version__}"


def _gap(value: float | None) -> str:
    return "" if value is None else "=" if value == 0 else f"{value:.0e}"


def _yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "**no**"


def text(why: str) -> str:
    return why[:200].replace("|", "/").replace("<", "‹").replace(">", "›")

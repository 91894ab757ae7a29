"""Which strategy is best for me?  python -m fsdp2.compare --strategies ddp,fsdp1,fsdp2 --model transformer

Trains the same model with each strategy and variant, in turn, and reports losses, time, memory, collectives and
checkpoints. Every other flag is one of `fsdp2.train`'s.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp2.run.process import early
from fsdp2_tools.compare.options import parse

if __name__ == "__main__":
    early.answer(parse)

from fsdp2.options.errors import require
from fsdp2.run.process import ending
from fsdp2.run.process.group import RunStopped
from fsdp2.units import short
from fsdp2_tools import results
from fsdp2_tools.compare import report
from fsdp2_tools.compare.advice import advice
from fsdp2_tools.compare.measure import Measured, measure, memory_of_rank
from fsdp2_tools.compare.variants import rows

WARM_UP = 5  # steps in which caches fill and torch still compiles what it compiles lazily


def main(arguments: Sequence[str] | None = None) -> list[Measured]:
    """Compare, write to `--out`, and return the measurements. Raises ConfigError before anything is started."""
    options, training = parse(arguments)
    table = rows(options["strategies"], options["variants"], training, options["nproc"])
    require("plotly", "plots", "the page")
    out = results.folder(options["out"], below="comparisons")
    steps, repeats = options["steps"], options["repeats"]
    warm_up = min(WARM_UP, steps // 2)
    say, load = results.clock(), os.getloadavg()[0]
    with results.temporary() as folder:
        found = measure(table, folder, steps=steps, warm_up=warm_up, repeats=repeats, say=say)
    words = arguments if arguments is not None else sys.argv[1:]
    facts = {
        **results.facts(f"python -m fsdp2.compare {shlex.join(words)}", options["nproc"]),
        "load before": f"{load:.1f} processes",
        "measured": f"{repeats} × {steps} steps a row, the rows in turn; {warm_up} of warming up left out",
    }
    lines = advice(found, options["budget"] or memory_of_rank(options["nproc"], training.get("device", "auto")))
    write(found, facts, lines, out)
    print(report.terminal(report.HEADINGS, report.cells(found)))
    print("\n".join(lines))
    print(f"more in {short(out.absolute())}: compare.html, .png, .md, .csv, .json, memory.png")
    if all(row.failed is not None for row in found):
        raise RunStopped("no row could be measured")
    return found


def write(found: Sequence[Measured], facts: dict[str, Any], lines: Sequence[str], out: Path) -> None:
    """All forms of the result, into a folder."""
    from fsdp2_tools.compare.picture import page, write_image, write_memory_image

    results.write(out / "compare.md", report.as_markdown(found, facts, lines))
    results.write(out / "compare.csv", report.as_csv(found))
    results.write(out / "compare.json", report.as_json(found, facts, lines))
    results.write(out / "compare.html", page(found, facts, lines))
    write_image(found, out / "compare.png")
    write_memory_image(found, out / "memory.png")


if __name__ == "__main__":
    with ending.exit_status():
        main()

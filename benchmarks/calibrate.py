"""The plan beside what was measured, before and after its rates were fitted:  python3 benchmarks/calibrate.py results

Reads what benchmarks/records.py has left in a folder, plans each of its rows, and writes records-planned.md there. Each
row's time is planned with rates that were fitted on all the others. It needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tests.gpu.wheels import environment  # noqa: E402

if __name__ == "__main__":
    sys.path[:0] = environment()["PYTHONPATH"].split(os.pathsep)

from tables import write_page  # noqa: E402

from fsdp2.config import parse  # noqa: E402
from fsdp2.options.errors import ConfigError  # noqa: E402
from fsdp2_tools.compare.report import markdown_table  # noqa: E402
from fsdp2_tools.plan.calibration import LEAST, Trial, changed, fit  # noqa: E402
from fsdp2_tools.plan.device import Gpu  # noqa: E402
from fsdp2_tools.plan.device import gpu as find_gpu  # noqa: E402
from fsdp2_tools.plan.plans import Plan, plan  # noqa: E402

NAMES = {"H200": "h200", "H100": "h100", "A100": "a100-80", "B200": "b200", "L40S": "l40s"}
HEADS = ("", "allocator ÷ plan", "device ÷ plan", "planned ÷ measured time", "fitted on the other rows")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/calibrate.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="of records.json; gets records-planned.md")
    parser.add_argument("--gpu", help="as fsdp2.plan takes it (default: by the name that was measured)")
    parser.add_argument("--workers", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    given = parser.parse_args()
    found = json.loads((given.folder / "records.json").read_text())
    facts, rows = found["facts"], {key: row for key, row in found["rows"].items() if "step_ms" in row}
    device = given.gpu or name_of(facts)
    gpu = find_gpu(device)
    planned: dict[str, Plan] = {}
    missing = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, spawn) as pool:
        waiting = {key: pool.submit(planned_row, row["flags"], row["world_size"], gpu) for key, row in rows.items()}
        for key, future in waiting.items():
            try:
                planned[key] = future.result()
            except ConfigError as error:
                missing[key] = str(error)
            print(f"planned {key}", flush=True)
            write_page(given.folder / "records-planned.md", page(facts, rows, planned, missing, gpu))
    print((given.folder / "records-planned.md").read_text())


def name_of(facts: dict[str, Any]) -> str:
    """The planner's name of what was measured; ends the program if it knows none."""
    if facts["memory"] is None:
        return "cpu"
    for pattern, name in NAMES.items():
        if re.search(rf"\b{pattern}\b", facts["name"]):
            return name
    sys.exit(f"{facts['name']} isn't in the planner's table; give --gpu FILE.toml (docs/plan.md)")


def planned_row(flags: list[str], ranks: int, gpu: Gpu) -> Plan:
    warnings.simplefilter("ignore")
    return plan(parse(flags), ranks, gpu, None, keep=True)


def page(
    facts: dict[str, Any], rows: dict[str, Any], planned: dict[str, Plan], missing: dict[str, str], gpu: Gpu
) -> str:
    trials = {
        key: Trial(one.config, one.ranks, rows[key]["step_ms"], one.runs)
        for key, one in planned.items()
        if one.runs is not None
    }
    before = {
        key: planned[key].time.milliseconds / one.milliseconds for key, one in trials.items() if planned[key].time
    }  # type: ignore[union-attr]
    after = dict(fitted_on_others(trials, gpu))
    cells = []
    for key, one in planned.items():
        row = rows[key]
        memory = [
            f"{row[name] / by:.3f}" if name in row else ""
            for name, by in (("allocated_bytes", one.tensors), ("device_bytes", one.bytes))
        ]
        cells.append((key, *memory, *(f"{times[key]:.2f}" if key in times else "" for times in (before, after))))
    off = [
        f"- Times are off by {statistics.median(abs(x - 1) for x in times.values()):.0%} (median), at worst "
        f"{max(abs(x - 1) for x in times.values()):.0%}, {what}"
        for what, times in (("with the table's rates", before), ("with rates fitted on the other rows", after))
        if times
    ]
    text = [
        "# Plans beside records",
        "Written by `benchmarks/calibrate.py` from the rows of `benchmarks/records.py`. The first ratio is the "
        "allocator's peak by the plan's tensors, the second all that the GPU had in use by all that was planned.",
        "\n".join(
            [f"- Planned as {gpu.name}, measured on {facts['name']}, {facts['date']}; {facts['versions']}", *off]
        ),
        markdown_table(HEADS, cells),
    ]
    text += ["Not planned:\n\n" + "\n".join(f"- {key}: {why}" for key, why in missing.items())] if missing else []
    return "\n\n".join(text) + "\n"


def fitted_on_others(trials: dict[str, Trial], gpu: Gpu) -> Iterator[tuple[str, float]]:
    """Planned by measured time of each row, with rates that it had no part in."""
    if gpu.speed is None or len(trials) <= LEAST:
        return
    for key, one in trials.items():
        others: Sequence[Trial] = [other for name, other in trials.items() if name != key]
        yield key, one.planned(changed(gpu.speed, fit(others, gpu.speed))) / one.milliseconds


if __name__ == "__main__":
    main()

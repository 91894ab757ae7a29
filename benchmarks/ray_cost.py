"""The cost of Ray: the same training under both launchers, in pairs.

    python benchmarks/ray_cost.py --pairs 5 --epochs 20

Both sides of a pair run one after the other, and the order alternates. What was measured is written as a page into
docs/notes/.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from tables import machine, spread

from fsdp2.options.parser import Parser
from fsdp2_tools.compare.report import markdown_table
from launchers.parity import command

PAGE = Path(__file__).parent.parent / "docs" / "notes" / "ray-benchmark.md"
WARM_UP_STEPS = 10
Times = dict[str, float]


def measure(side: str, workers: int, run: Path, flags: list[str]) -> Times:
    """Seconds of a whole run and of its parts; of a step the median in milliseconds."""
    began = time.time()
    result = subprocess.run([*command(side, workers, run), *flags], capture_output=True, text=True)
    ended = time.time()
    if result.returncode != 0:
        sys.exit(result.stdout + result.stderr)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    end = records[-1]
    steps = [record["step_ms"] for record in records if record["kind"] == "train"][WARM_UP_STEPS:]
    # The run itself, from its header to its last line, has a clock of its own; before it is start-up, after it the end.
    trained_until = (run / "metrics.jsonl").stat().st_mtime
    return {
        "whole run, s": ended - began,
        "until the header, s": trained_until - end["seconds"] - began,
        "training, with evaluations and checkpoints, s": end["seconds"],
        "after the last line, s": ended - trained_until,
        "step, ms": statistics.median(steps),
    }


def main() -> None:
    parser = Parser(prog="benchmarks/ray_cost.py", allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20, help="20 are two minutes with start-up on 2 cores")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    flags = ["--device=cpu", "--threads=1", f"--epochs={arguments.epochs}"]
    # Where Python may not keep its bytecode, each process compiles torch again, and Ray has more of them.
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""
    for side in ("torchrun", "ray"):
        with tempfile.TemporaryDirectory() as folder:
            measure(side, arguments.workers, Path(folder) / "run", [*flags, "--epochs=1"])  # so that all is cached
    found: dict[str, list[Times]] = {"torchrun": [], "ray": []}
    load = os.getloadavg()[0]
    for pair in range(arguments.pairs):
        for side in ("torchrun", "ray") if pair % 2 == 0 else ("ray", "torchrun"):
            with tempfile.TemporaryDirectory() as folder:
                found[side].append(measure(side, arguments.workers, Path(folder) / "run", flags))
            print(pair + 1, side, {key: round(value, 2) for key, value in found[side][-1].items()}, flush=True)
    arguments.page.write_text(page(found, flags, arguments.workers, load))


def page(found: dict[str, list[Times]], flags: list[str], workers: int, load: float) -> str:
    rows = []
    for key in found["ray"][0]:
        torchrun, ray = ([times[key] for times in found[side]] for side in ("torchrun", "ray"))
        ratio = [b / a for a, b in zip(torchrun, ray, strict=True)]
        rows.append((key, spread(torchrun), spread(ray), spread(ratio)))
    ratios = {row[0]: row[3] for row in rows}
    return f"""# What Ray costs

Written by `benchmarks/ray_cost.py`: the same training under torchrun and through Ray, one after the other, the order
alternating. A cell is the median of {len(found["ray"])} pairs, with minimum and maximum; a ratio is taken within each
pair.

- Flags: `{" ".join(flags)}`, {workers} ranks
- Date: {time.strftime("%Y-%m-%d")}
- Machine: {machine()}
- Load: {load:.1f} processes in the minute before
- Versions: Python {platform.python_version()}, torch {version("torch")}, ray {version("ray")}

{markdown_table(("", "torchrun", "ray", "ray / torchrun"), rows)}

Aims: a step 1.00 ± 0.02, and a whole run of two minutes at most 1.15 times as long. Measured: {ratios["step, ms"]}
and {ratios["whole run, s"]}. A step's time is the median after {WARM_UP_STEPS} of warming up; evaluations, checkpoints
and Ray's reports are not part of it, but of the training.
"""


if __name__ == "__main__":
    main()

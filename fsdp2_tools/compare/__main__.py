"""Which strategy is best for me?  python -m fsdp2.compare --strategies ddp,fsdp1,fsdp2 --model transformer

Trains the same model with each strategy and variant, in turn, and reports losses, time, memory, collectives and
checkpoints. Every other flag is one of `fsdp2.train`'s.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError, flag_of, require, shown, unknown
from fsdp2.options.parser import make_parser, read_values
from fsdp2.options.strategies import STRATEGIES
from fsdp2.options.values import checked, location, whole
from fsdp2.run import ending
from fsdp2.run.rundir import environment
from fsdp2.units import byte_count, short
from fsdp2_tools.compare import report
from fsdp2_tools.compare.advice import advice
from fsdp2_tools.compare.measure import Measured, measure, memory_of_rank
from fsdp2_tools.compare.variants import VARIANTS, rows

# What a comparison decides itself.
OURS = ("strategy", "run_dir", "resume", "resume_partial", "max_steps", "epochs", "memory_snapshot", "save_model")
INSTEAD = {"strategy": "--strategies", "max_steps": "--steps", "epochs": "--steps"}
WARM_UP = 5  # steps in which caches fill and torch still compiles what it compiles lazily


def main(arguments: Sequence[str] | None = None) -> list[Measured]:
    """Compare, write to `--out`, and return the measurements. Raises ConfigError before anything is started."""
    options, training = _parse(arguments)
    table = rows(options["strategies"], options["variants"], training, options["nproc"])
    out = Path(options["out"] or f"comparisons/{time.strftime('%Y%m%d-%H%M%S')}")
    require("plotly", "plots", "the page")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: can't be written ({error.strerror}); choose a folder that can") from None
    steps, repeats = options["steps"], options["repeats"]
    warm_up = min(WARM_UP, steps // 2)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(table, Path(folder), steps=steps, warm_up=warm_up, repeats=repeats, say=say)
    facts = {
        "command": "python -m fsdp2.compare " + shlex.join(arguments if arguments is not None else sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        **environment(options["nproc"]),
        "load before": f"{load:.1f} processes",
        "measured": f"{repeats} × {steps} steps a row, the rows in turn; {warm_up} of warming up left out",
    }
    lines = advice(found, options["budget"] or memory_of_rank(options["nproc"], training.get("device", "auto")))
    write(found, facts, lines, out)
    print(report.terminal(report.HEADINGS, report.cells(found)))
    print("\n".join(lines))
    print(f"more in {short(out.absolute())}: compare.html, .png, .md, .csv, .json, memory.png")
    return found


def write(found: Sequence[Measured], facts: dict[str, Any], lines: Sequence[str], out: Path) -> None:
    """All forms of the result, into a folder."""
    from fsdp2_tools.compare.picture import page, write_image, write_memory_image

    (out / "compare.md").write_text(report.as_markdown(found, facts, lines))
    (out / "compare.csv").write_text(report.as_csv(found))
    (out / "compare.json").write_text(report.as_json(found, facts, lines))
    (out / "compare.html").write_text(page(found, facts, lines))
    write_image(found, out / "compare.png")
    write_memory_image(found, out / "memory.png")


def _parse(arguments: Sequence[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The comparison's own options and the training's."""
    parser = make_parser(
        Config,
        prog="fsdp2.compare",
        description="Train the same model with several strategies, and compare losses, time and memory.",
    )
    own = parser.add_argument_group("the comparison")
    own.add_argument("--strategies", metavar="A,B", help=f"of {', '.join(STRATEGIES)} (default: ddp,fsdp1,fsdp2)")
    own.add_argument("--variants", metavar="A,B", help=f"sets of flags: {', '.join(VARIANTS)} (default: default)")
    own.add_argument("--nproc", metavar="N", help="ranks on this machine (default: 2)")
    own.add_argument("--steps", metavar="N", help="optimizer steps of a run (default: 20)")
    own.add_argument("--repeats", metavar="N", help="runs of each row (default: 3)")
    own.add_argument(
        "--budget", metavar="BYTES", help="memory that a rank may use (default: its share of the device's)"
    )
    own.add_argument("--out", metavar="DIR", help="where the results go (default: comparisons/<time>)")
    given = vars(parser.parse_args(arguments))
    for name in OURS:
        if name in given:
            instead = f", or use {INSTEAD[name]}" if name in INSTEAD else ""
            raise ConfigError(f"{flag_of(name)}: a comparison decides this itself; drop it{instead}")
    defaults = {"strategies": "ddp,fsdp1,fsdp2", "variants": "default", "nproc": 2, "steps": 20, "repeats": 3}
    values: dict[str, Any] = {"budget": None, "out": None, **defaults}
    values |= {name: given.pop(name) for name in list(values) if name in given}
    for name, parse in (
        ("nproc", whole(1, 256)),
        ("steps", whole(2, 10**6)),
        ("repeats", whole(1, 1000)),
        ("budget", byte_count),
        ("out", location),
    ):
        if values[name] is not None:
            values[name] = checked(f"--{name}", values[name], parse)
    for name in ("strategies", "variants"):
        values[name] = list(dict.fromkeys(part.strip() for part in values[name].split(",")))
    for strategy in values["strategies"]:
        if strategy not in STRATEGIES:
            raise ConfigError(f"--strategies {shown(strategy)}: {unknown(shown(strategy), list(STRATEGIES))}")
    training = read_values(Config, given)
    if training.get("checkpoint_every") == "never":
        raise ConfigError("--checkpoint-every never: a comparison measures saves and loading too; drop it")
    return values, training


if __name__ == "__main__":
    with ending.exit_status():
        main()

"""Will it fit, and how fast is it?  python -m fsdp2.plan --model llama --model-size 8b --ranks 8,64 --gpu h100

Executes the training on tensors without memory, as one rank of many, and says what it takes. It needs no GPU, no
download and no other process. Every other flag is one of `fsdp2.train`'s.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from fsdp2.run.process import early
from fsdp2_tools.plan.options import parser

if __name__ == "__main__":
    early.answer(parser().parse_args)

from fsdp2.checkpoint.files import publish
from fsdp2.checkpoint.places import open_files
from fsdp2.config import Config
from fsdp2.options.errors import ConfigError, require, shown
from fsdp2.options.parser import read_values, to_flags
from fsdp2.options.values import LONGEST_PATH, checked, location, whole
from fsdp2.report.planned import FILE as PLAN
from fsdp2.run.process import ending
from fsdp2.units import byte_count, short
from fsdp2_tools import results
from fsdp2_tools.plan import advice, calibration, page, report, report_search, report_time
from fsdp2_tools.plan.device import Gpu
from fsdp2_tools.plan.device import gpu as find_gpu
from fsdp2_tools.plan.plans import Plan, plan
from fsdp2_tools.plan.search import choices, search

MOST_RANKS = 65536
MOST_TOKENS = 1e18


def main(arguments: Sequence[str] | None = None) -> list[Plan]:
    """Plan, print, and return the plans. Raises ConfigError for flags that make no sense."""
    given = vars(parser().parse_args(arguments))
    ranks = _ranks(given.pop("ranks", "8"))
    place, budget, as_json = given.pop("gpu", None), given.pop("budget", None), given.pop("json", False)
    trials = given.pop("calibration", None)
    gpu = None if place is None else find_gpu(place)
    if trials is not None and (gpu is None or gpu.speed is None):
        raise ConfigError(
            f"--calibration {shown(trials, LONGEST_PATH)}: needs a --gpu with rates to fit; of ranks on CPUs --gpu cpu"
        )
    limit = gpu.memory if gpu is not None else None
    tokens = given.pop("tokens", None)
    if tokens is not None:
        tokens = checked("--tokens", tokens, token_count)
    if budget is not None:
        limit = checked("--budget", budget, byte_count)
    html = given.pop("html", None)
    if html is not None:
        html = checked("--html", html, location)
        require("plotly", "plots", "--html")
        if not Path(html).absolute().parent.is_dir():
            raise ConfigError(f"--html {html}: there is no folder {Path(html).parent}; make it, or choose another")
    searching, out = given.pop("search", False), given.pop("out", None)
    config = Config(**read_values(Config, given))
    if searching:
        _check_search(ranks, gpu)
    elif out is not None:
        raise ConfigError(f"--out {shown(out, LONGEST_PATH)}: only a search leaves results; add --search, or drop it")
    if tokens is not None and (gpu is None or gpu.speed is None or config.spec.kind != "language"):
        raise ConfigError("--tokens: needs a language model, and a --gpu whose speed is known")
    began = time.monotonic()

    def say(text: str) -> None:
        if not as_json:
            print(f"[{time.monotonic() - began:4.0f} s] {text}", file=sys.stderr, flush=True)

    # torch warns of things that a process without a device does.
    warnings.simplefilter("ignore")

    if trials is not None:
        assert gpu is not None
        found_rates = calibration.calibrate(
            gpu, calibration.read(checked("--calibration", trials, location), gpu, config, say)
        )
        say(found_rates.told)
        gpu = found_rates.gpu

    if searching:
        assert gpu is not None
        folder = checked("--out", out, location) if out else None
        return _search(config, ranks[0], gpu, limit, folder, say, as_json)
    plans = []
    for count in ranks:
        say(f"planning {count:,} ranks")
        plans.append(plan(config, count, gpu, limit, last=True))
    lines = report.lines(plans, gpu)
    if gpu is not None:
        lines += report_time.lines(plans, gpu, tokens)
    found, wasted = None, None
    tried: dict[Config, Plan] = {}  # a flag alone is tried again where others were of no use

    def replan(changed: Config, flags: str) -> Plan:
        if changed not in tried:
            say(f"trying {flags}")
            tried[changed] = plan(changed, advised.ranks, gpu, limit)
        return tried[changed]

    # A run that is out of memory in spite of its plan finds there what would save how much.
    kept = plans[-1] if config.run_dir is not None else None
    advised = next((one for one in reversed(plans) if not one.fits), plans[-1])
    if not advised.fits or kept is not None:
        found = advice.advise(advised, replan)
        if not advised.fits:
            lines += ["", f"on {advised.ranks:,} ranks:", *advice.lines(found, advised)]
    if advised.fits and limit is not None:
        wasted = advice.wasted(advised, replan)
        lines += ["", f"on {advised.ranks:,} ranks:", *advice.wasted_lines(wasted, advised)]
    text = report.as_json(plans, gpu, found, tokens, wasted)
    print(text if as_json else "\n".join(lines))
    if html is not None:
        _draw(Path(html), plans, gpu, limit, say)
    if config.run_dir is not None:
        _leave(config, text)
    return plans


def _check_search(ranks: Sequence[int], gpu: Gpu | None) -> None:
    """Raises ConfigError for flags with which there is nothing to rank by."""
    if len(ranks) > 1:
        raise ConfigError(f"--search: is for one number of ranks; choose one of --ranks {','.join(map(str, ranks))}")
    if gpu is None or gpu.speed is None:
        raise ConfigError(
            "--search: ranks settings by their time, which needs a --gpu whose speed is known; give one, or measure "
            "them with python -m fsdp2.tune"
        )
    require("matplotlib", "plots", "the picture of --search")


def _search(
    config: Config, ranks: int, gpu: Gpu, limit: int | None, out: str | None, say: Callable[[str], None], as_json: bool
) -> list[Plan]:
    """Plans of settings, the best first, after they were printed and the best was written to a folder."""

    def replan(changed: Config, flags: str) -> Plan:
        say(f"planning {flags}")
        return plan(changed, ranks, gpu, limit)

    found = search(config, choices(config, ranks, gpu=not gpu.on_cpu), replan)
    following = report_search.write(found, out)
    data = {"ranks": ranks, "settings": report_search.as_data(found)}
    print(json.dumps(data, indent=1) if as_json else "\n".join([*report_search.lines(found), *following]))
    return [one.plan for one in found]


def _draw(file: Path, plans: Sequence[Plan], gpu: Gpu | None, limit: int | None, say: Callable[[str], None]) -> None:
    """Write the page, after other batch sizes were planned."""
    every = list(plans)
    config = plans[0].config
    for count in (one.ranks for one in plans):
        for size in page.batches(config):
            if size != config.batch_size:
                say(f"planning {count:,} ranks with --batch-size {size}")
                every.append(plan(dataclasses.replace(config, batch_size=size), count, gpu, limit))
    results.write(file, page.page(every, gpu, config, say), "--html")
    say(f"open {short(file.absolute())}")


def _leave(config: Config, plans: str) -> None:
    """Put the plans into the run directory, for the header of the run."""
    try:
        files = open_files(str(config.run_dir))
        files.mkdir("")
        publish(files, PLAN, json.dumps({"flags": to_flags(config), **json.loads(plans)}, indent=1).encode())
    except (OSError, ImportError, ValueError) as error:
        raise ConfigError(
            f"--run-dir {config.run_dir}: can't be written ({error}); choose another, or drop it"
        ) from None


def token_count(value: object) -> float:
    """A number such as 15000000000 or 15e12. Raises ValueError."""
    try:
        number = float(str(value)[:40])
    except ValueError:
        number = 0.0
    if not 1 <= number <= MOST_TOKENS:
        raise ValueError("must be a number of tokens such as 15e12")
    return number


def _ranks(value: str) -> list[int]:
    return list(dict.fromkeys(checked("--ranks", part.strip(), whole(1, MOST_RANKS)) for part in value.split(",")))


if __name__ == "__main__":
    with ending.exit_status():
        main()

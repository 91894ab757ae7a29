"""Will it fit, and how fast is it?  python -m fsdp2.plan --model llama --model-size 8b --ranks 8,64 --gpu h100

Executes the training on tensors without memory, as one rank of many, and says what it takes. It needs no GPU, no
download and no other process. Every other flag is one of `fsdp2.train`'s.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from fsdp2.report import PLAN
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

Say = Callable[[str], None]  # tells what is being done


@dataclass(frozen=True)
class Asked:
    """The flags of a plan.

    Attributes:
        limit: bytes that a rank may use; None if nothing says.
        tokens: of a training whose cost is to be said.
        trials: the file of `--calibration`.
        out: where `--search` leaves its results.
    """

    config: Config
    ranks: list[int]
    gpu: Gpu | None
    limit: int | None
    tokens: float | None
    trials: str | None
    searching: bool
    out: str | None
    html: Path | None
    as_json: bool
    advises: bool

    def tell(self, *lines: str) -> None:
        if not self.as_json:
            print(*lines, sep="\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> list[Plan]:
    """Plan, print, and return the plans. Raises ConfigError for flags that make no sense."""
    asked = read(arguments)
    say: Say = (lambda text: None) if asked.as_json else results.clock(sys.stderr)
    warnings.simplefilter("ignore")  # torch warns of things that a process without a device does
    if asked.trials is not None:
        assert asked.gpu is not None
        trials = calibration.read(asked.trials, asked.gpu, asked.config, say)
        found = calibration.calibrate(asked.gpu, trials)
        say(found.told)
        asked = dataclasses.replace(asked, gpu=found.gpu)
    return _search(asked, say) if asked.searching else _plan(asked, say)


def read(arguments: Sequence[str] | None) -> Asked:
    """Raises ConfigError for flags that make no sense."""
    given = vars(parser().parse_args(arguments))
    ranks = _ranks(given.pop("ranks", "8"))
    place, trials, searching = given.pop("gpu", None), given.pop("calibration", None), given.pop("search", False)
    gpu = None if place is None else find_gpu(place)
    is_fast = gpu is not None and gpu.speed is not None
    if trials is not None and not is_fast:
        raise ConfigError(
            f"--calibration {shown(trials, LONGEST_PATH)}: needs a --gpu with rates to fit; of ranks on CPUs --gpu cpu"
        )
    own = {
        name: None if (value := given.pop(name, None)) is None else checked(f"--{name}", value, parse)
        for name, parse in (("budget", byte_count), ("tokens", token_count), ("html", location), ("out", location))
    }
    html = None if own["html"] is None else Path(own["html"])
    if html is not None:
        require("plotly", "plots", "--html")
        if not html.absolute().parent.is_dir():
            raise ConfigError(f"--html {html}: there is no folder {html.parent}; make it, or choose another")
    as_json, advises = given.pop("json", False), given.pop("advice", True)
    config = Config(**read_values(Config, given))
    if searching and not advises:
        raise ConfigError("--no-advice with --search: a search is about other flags; drop one of them")
    if searching:
        _check_search(ranks, gpu)
    elif own["out"] is not None:
        raise ConfigError(f"--out {own['out']}: only a search leaves results; add --search, or drop it")
    if own["tokens"] is not None and (not is_fast or config.spec.kind != "language"):
        raise ConfigError("--tokens: needs a language model, and a --gpu whose speed is known")
    limit = own["budget"] or (None if gpu is None else gpu.memory)
    trials = None if trials is None else checked("--calibration", trials, location)
    return Asked(config, ranks, gpu, limit, own["tokens"], trials, searching, own["out"], html, as_json, advises)


def _plan(asked: Asked, say: Say) -> list[Plan]:
    """Plans for each number of ranks, after they were printed, with advice, and written where that was asked for."""
    plans = []
    for count in asked.ranks:
        say(f"planning {count:,} ranks")
        plans.append(plan(asked.config, count, asked.gpu, asked.limit, last=True))
    # Before what takes as long again: what flags would save.
    times = [] if asked.gpu is None else report_time.lines(plans, asked.gpu, asked.tokens)
    asked.tell(*report.lines(plans, asked.gpu), *times)
    found, wasted = _advise(asked, plans, say) if asked.advises else (None, None)
    text = report.as_json(plans, asked.gpu, found, asked.tokens, wasted)
    if asked.as_json:
        print(text)
    if asked.html is not None:
        _draw(asked.html, plans, asked.gpu, asked.limit, say)
    if asked.config.run_dir is not None:
        _leave(asked.config, text)
    return plans


def _advise(
    asked: Asked, plans: Sequence[Plan], say: Say
) -> tuple[advice.Advice | None, list[tuple[str, Plan]] | None]:
    """Plan with other flags, print and return: of a plan that doesn't fit what saves, of others what could be used."""
    tried: dict[Config, Plan] = {}  # a flag alone is tried again where others were of no use

    def replan(changed: Config, flags: str) -> Plan:
        if changed not in tried:
            say(f"trying {flags}")
            tried[changed] = plan(changed, advised.ranks, asked.gpu, asked.limit)
        return tried[changed]

    advised = next((one for one in reversed(plans) if not one.fits), plans[-1])
    found, wasted = None, None
    # A run that is out of memory in spite of its plan finds in its directory what would save how much.
    if not advised.fits or asked.config.run_dir is not None:
        found = advice.advise(advised, replan)
        if not advised.fits:
            asked.tell("", f"on {advised.ranks:,} ranks:", *advice.lines(found, advised))
    if advised.fits and asked.limit is not None:
        wasted = advice.wasted(advised, replan)
        asked.tell("", f"on {advised.ranks:,} ranks:", *advice.wasted_lines(wasted, advised))
    return found, wasted


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


def _search(asked: Asked, say: Say) -> list[Plan]:
    """Plans of settings, the best first, after they were printed and the best was written to a folder."""
    config, (ranks,), gpu = asked.config, asked.ranks, asked.gpu
    assert gpu is not None

    def replan(changed: Config, flags: str) -> Plan:
        say(f"planning {flags}")
        return plan(changed, ranks, gpu, asked.limit)

    found = search(config, choices(config, ranks, gpu=not gpu.on_cpu), replan)
    following = report_search.write(found, asked.out)
    data = {"ranks": ranks, "settings": report_search.as_data(found)}
    print(json.dumps(data, indent=1) if asked.as_json else "\n".join([*report_search.lines(found), *following]))
    return [one.plan for one in found]


def _draw(file: Path, plans: Sequence[Plan], gpu: Gpu | None, limit: int | None, say: Say) -> None:
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
        raise ConfigError(f"--run-dir {config.run_dir}: can't be written ({error}); give another, or drop it") from None


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

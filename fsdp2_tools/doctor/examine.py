"""The whole examination: what rank 0 asks, in which order, and how the report reads."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError
from fsdp2.run.directory.rundir import default_path
from fsdp2.run.process import runtime
from fsdp2.run.process.meeting import meeting_point
from fsdp2.run.process.runtime import World
from fsdp2_tools.doctor import clock, collectives, compute, dataset, machine, network, step, storage
from fsdp2_tools.doctor.asking import STARTING, Asker, Here, Question
from fsdp2_tools.doctor.judging import BAD, OK, VERDICTS, Hosts, Row, status
from fsdp2_tools.doctor.options import SECONDS

QUESTIONS: dict[str, Question] = {
    "hello": network.hello,
    "machine": machine.measure,
    "clock": clock.measure,
    "data": dataset.measure,
    "meet": network.meet,
    "leave_nonce": storage.leave_nonce,
    "storage": storage.measure,
    "clean": storage.clean,
    "room": storage.room,
    "collectives": collectives.measure,
    "compute": compute.measure,
}
# A training does without the answers of the first three. Data and models that take long aren't looked at.
HARMLESS = (("machine", "failed"), ("clock", "failed"), ("clean", "failed"), ("data", "hung"), ("room", "hung"))
FINAL = ("fit to train", "worse than expected", "can't train")


@dataclass(frozen=True)
class Options:
    """The scope of an examination.

    Attributes:
        seconds: that a rank has to answer a question.
        quick: leave out what takes more than a few seconds.
        json: print the rows as data.
        step: plan a step of the training.
    """

    config: Config
    seconds: float = SECONDS
    quick: bool = False
    json: bool = False
    step: bool = False


def examine(asker: Asker, options: Options) -> list[Row]:
    """All rows. Called on rank 0 while the others `serve`."""
    hosts = Hosts({rank: tuple(one) for rank, one in asker.ask("hello").items()})
    if 0 not in hosts.of:
        return asker.rows(hosts)
    asker.left_out = {*range(asker.here.world.world_size)} - {*hosts.of}  # nothing can be said of their hosts
    found = asker.ask("machine")
    rows = machine.rows(found, hosts)
    if len({*hosts.of.values()}) > 1:
        rows += clock.rows(clock.ask_clocks(asker), hosts)
    rows += dataset.rows(asker.ask("data"), hosts, options.config.dataset)
    place = options.config.run_dir or str(default_path(options.config.model).parent)
    stored = storage.ask_storage(asker, place, (4 << 20) if options.quick else (32 << 20))
    rows += storage.rows(stored, hosts, place, asker.ask("room", place=place).get(0))
    computed = compute.ask_compute(asker, 0.3 if options.quick else 0.5)
    rows += compute.rows(computed, hosts)
    if asker.here.world.world_size > 1:
        rows += _exchanges(asker, hosts, found, computed, options)
    return [*asker.rows(hosts, judged=("collectives",), harmless=HARMLESS), *rows]


def _exchanges(
    asker: Asker, hosts: Hosts, found: Mapping[int, Any], computed: Mapping[int, Any], options: Options
) -> list[Row]:
    """Pairs first: a group connects each rank with each, so it can't be made where a pair is dead."""
    size = (4 << 20) if options.quick else (16 << 20)
    pairs = network.ask_pairs(asker, hosts, size)
    rows = network.rows(pairs, hosts, size)
    rates = [one["rate"] for one in pairs.values() if "rate" in one]
    if not rates or len(rates) < len(pairs) or len(asker.asked) < asker.here.world.world_size:
        return rows
    sizes = [64 << 10, 1 << 20] if options.quick else [64 << 10, 1 << 20, 32 << 20]
    crowding = max((len(hosts.ranks(hosts.of[rank])) / len(one["cores"]) for rank, one in found.items()), default=1.0)
    done, hanging = collectives.ask_collectives(asker, sizes, hosts)
    rows += [*hanging, *collectives.rows(done, sizes, collectives.PART * min(rates) / max(1.0, crowding), hosts)]
    if options.step and not options.quick:
        rows += step.rows(options.config, asker.here.device, step.measured(computed, pairs, done, hosts))
    return rows


def run(options: Options, world: World, device: torch.device, show: Callable[[list[Row], float], None]) -> list[Row]:
    """Every rank's part of an examination; the rows, on all ranks. A collective call, which no rank waits in forever.

    Args:
        show: called on rank 0 with the rows and the seconds that they took, before any rank may end.

    Raises RunStopped on a rank to which rank 0 is silent.
    """
    runtime.set_threads(options.config.threads, world)
    store = meeting_point(world, STARTING + options.seconds, "doctor")
    asker = Asker(Here(world, device, store, options.seconds, config=options.config), QUESTIONS)
    atexit.register(_leave_what_hangs, asker.here.left)  # a training that is refused ends by sys.exit
    if world.rank != 0:
        return [Row(**row) for row in asker.serve()]
    began = time.monotonic()
    rows = examine(asker, options)
    show(rows, time.monotonic() - began)
    asker.end([dataclasses.asdict(row) for row in rows])
    return rows


def _leave_what_hangs(left: Sequence[Callable[[], bool]]) -> None:
    if any(hangs() for hangs in left):
        leave(VERDICTS.index(BAD))


def reported(options: Options) -> int:
    """The exit status of an examination, after rank 0 has printed it. A collective call, also in a launcher's group."""
    world = runtime.world()
    device = runtime.pick_device(options.config.device, world)

    def show(rows: list[Row], took: float) -> None:
        text = as_json(rows, world) if options.json else "\n".join(lines(rows, world.world_size, took))
        print(text, flush=True)

    return status(run(options, world, device, show))


def lines(rows: Sequence[Row], ranks: int, seconds: float, *, findings: bool = False) -> list[str]:
    """The report for a terminal: each row, or the findings alone; below one, whom it is about and what to do."""
    shown = [row for row in rows if row.verdict != OK or not findings]
    name = max((len(row.name) for row in shown), default=0)
    text = []
    for row in shown:
        text.append(f"{row.verdict:5}  {row.name:{name}}  {row.measured}  (expected: {row.expected})")
        if row.verdict != OK:
            text.append(f"{'':5}  {'':{name}}  {row.who}: {row.fix}")
    counts = [f"{sum(row.verdict == verdict for row in rows)} {verdict}" for verdict in VERDICTS]
    return [*text, f"{FINAL[status(rows)]}: {', '.join(counts)}; {ranks} rank{'s' * (ranks > 1)}, {seconds:.0f} s"]


def as_json(rows: Sequence[Row], world: World) -> str:
    report: Mapping[str, Any] = {
        "status": status(rows),
        "ranks": world.world_size,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    return json.dumps(report, indent=1)


def before_training(config: Config, world: World, device: torch.device) -> None:
    """Examine the ranks quickly, as `--doctor` asks. A collective call.

    What is worse than expected is printed, and the run goes on. Raises ConfigError on every rank for what is bad.
    """

    def show(rows: list[Row], took: float) -> None:
        print("\n".join(f"doctor: {line}" for line in lines(rows, world.world_size, took, findings=True)), flush=True)

    rows = run(Options(config, quick=True), world, device, show)
    if device.type == "cuda":  # the training's memory is its own
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    for row in rows:
        if row.verdict == BAD:
            raise ConfigError(
                f"--doctor: {row.name}: {row.measured}; expected: {row.expected}; {row.who}: {row.fix}, or drop it"
            )


def leave(code: int) -> None:
    """End this process with a status, also where a thread still hangs in a disk or a network.

    Not sys.exit: at exit Python would wait for torch, and torch for the thread.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

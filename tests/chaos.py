"""Kill a training run at a seeded moment, resume it, and compare with a run that was never killed.

    python -m tests.chaos --points 500 --seed 1        # what `make chaos` does

Every point is real: two processes in a gloo group train, save and resume through `fsdp2.train`, and one of them,
or both, get SIGKILL from inside: at a file operation (before it, after it, or half-way through a write), in a training
step, or while tensors are copied for an asynchronous save. After each:

- every committed checkpoint is whole, and none that the run has reported is lost;
- the resumed run ends with the losses, step by step and bit for bit, and the weights of the uninterrupted one.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.store import Store, verify
from tests.chaos_rank import PATIENCE, Point, rank_main
from tests.harness import SMALL

STEPS, EVERY, KEEP = 6, 2, 2
FLAGS = [*SMALL, "--model=cnn"]
FLAGS += [f"--max-steps={STEPS}", f"--checkpoint-every={EVERY}", f"--keep={KEEP}"]


def run(folder: Path, name: str, flags: list[str], point: Point | None = None) -> list[int]:
    """Start two ranks and wait for their end; their exit codes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.chaos_rank"])  # torch is imported once, and each rank is a fork
    with tempfile.TemporaryDirectory() as meeting:
        line = [*FLAGS, *flags, f"--run-dir={folder / name}"]
        ranks: list[Any] = []
        for rank in (0, 1):
            arguments = (
                rank, f"{meeting}/store", str(folder / f"{name}-rank{rank}.log"), line, point,
                str(folder / f"{name}-moments{rank}.json"),
            )  # fmt: skip
            ranks.append(context.Process(target=rank_main, args=arguments, daemon=True))
            ranks[-1].start()
        deadline = time.monotonic() + 2 * PATIENCE
        try:
            while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
                wait([process.sentinel for process in ranks if process.is_alive()], timeout=1.0)
                if point is not None and point.both and any(process.exitcode == -signal.SIGKILL for process in ranks):
                    break
        finally:
            hung = [i for i, process in enumerate(ranks) if process.is_alive()]
            for process in ranks:
                process.kill()
                process.join()
    if hung and not (point is not None and point.both):
        raise AssertionError(f"{point}: rank {hung} still waited for the dead one after {2 * PATIENCE:.0f} s")
    return [process.exitcode for process in ranks]


def steps_of(run_path: Path) -> list[tuple[int, float]]:
    """(step, loss) of each line of the metrics file."""
    lines = [json.loads(line) for line in (run_path / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


def reported(run_path: Path) -> set[int]:
    """Steps whose checkpoints the run has said are committed."""
    if not (run_path / "metrics.jsonl").exists():
        return set()
    records = []
    for line in (run_path / "metrics.jsonl").read_bytes().splitlines():
        if line.endswith(b"}"):  # a kill may tear the last
            records.append(json.loads(line))
    return {record["step"] for record in records if record["kind"] == "checkpoint"}


@dataclass
class Reference:
    """Uninterrupted runs to compare with, one to resume from, and how many moments there are."""

    folder: Path
    losses: list[tuple[int, float]]
    weights: dict[str, torch.Tensor]
    # (background, resumed, rank) -> the moments of each kind, in order
    moments: dict[tuple[bool, bool, int], dict[str, list[str]]]


def flags_of(background: bool) -> list[str]:
    return ["--async-checkpoint"] if background else []


def prepare(folder: Path) -> Reference:
    moments: dict[tuple[bool, bool, int], dict[str, list[str]]] = {}
    assert run(folder, "half", ["--max-steps=3"]) == [0, 0], (folder / "half-rank0.log").read_text()
    for background in (False, True):
        for resumed in (False, True):
            name = f"reference-{background}-{resumed}"
            if resumed:
                shutil.copytree(folder / "half", folder / name)
            assert run(folder, name, flags_of(background)) == [0, 0], (folder / f"{name}-rank0.log").read_text()
            for rank in (0, 1):
                moments[background, resumed, rank] = json.loads((folder / f"{name}-moments{rank}.json").read_text())
    losses = steps_of(folder / "reference-False-False")
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    weights = torch.load(folder / "reference-False-False" / "full_model" / "full-model.pt", weights_only=True)
    return Reference(folder, losses, weights, moments)


def choose(reference: Reference, generator: random.Random) -> Point:
    """A point: first which kind of moment, each as likely as the others, then which of its many times.

    Nearly all operations are writes of a few bytes into a shard; the rename of the marker is one of thousands.
    """
    background, resumed, rank = generator.random() < 0.5, generator.random() < 0.4, generator.randrange(2)
    moments = reference.moments[background, resumed, rank]
    alike: dict[tuple[str, str], list[int]] = {}
    for kind, names in moments.items():
        for number, name in enumerate(names, 1):
            alike.setdefault((kind, without_numbers(name)), []).append(number)
    kind, name = generator.choice(sorted(alike))
    number, when = generator.choice(alike[kind, name]), generator.choice(["before", "after", "torn"])
    return Point(kind, number, rank, when, generator.random() < 0.5, background, resumed)


def without_numbers(moment: str) -> str:
    return re.sub("[0-9]+", "N", moment)


def check(reference: Reference, point: Point) -> str:
    """Kill a run at a point and hold the promises. Raises AssertionError; else says what was left by the kill."""
    folder, name = reference.folder, "victim"
    shutil.rmtree(folder / name, ignore_errors=True)
    if point.resumed:
        shutil.copytree(folder / "half", folder / name)
    codes = run(folder, name, flags_of(point.background), point)
    assert -signal.SIGKILL in codes, f"{point}: no rank was killed, exit codes {codes}"
    store = Store(LocalFiles(folder / name / "checkpoints"))
    committed = store.committed()
    for step in committed:
        verify(store.checkpoint(step))
    promised = sorted(reported(folder / name))
    assert not promised or (committed and committed[-1] >= promised[-1]), (
        f"{point}: {promised} reported, {committed} left"
    )
    lost = [step for step in promised[-KEEP:] if step not in committed and len(committed) < KEEP]
    assert not lost, f"{point}: {lost} lost, {committed} left"
    dead = len(store.files.list("")) - len(committed)
    codes = run(folder, name, flags_of(point.background))
    assert codes == [0, 0], f"{point}: the resumed run failed\n{(folder / f'{name}-rank0.log').read_text()[-3000:]}"
    assert steps_of(folder / name) == reference.losses, f"{point}: the resumed losses differ"
    weights = torch.load(folder / name / "full_model" / "full-model.pt", weights_only=True)
    assert weights.keys() == reference.weights.keys(), point
    assert all(torch.equal(weights[key], reference.weights[key]) for key in weights), f"{point}: other weights"
    return f"{len(committed)} committed, {dead} dead"


def main(points: int, seed: int, folder: Path) -> None:
    began, generator = time.monotonic(), random.Random(seed)
    reference = prepare(folder)
    left: collections.Counter[str] = collections.Counter()
    moments: collections.Counter[str] = collections.Counter()
    for number in range(1, points + 1):
        point = choose(reference, generator)
        left[check(reference, point)] += 1
        moments[what(reference, point)] += 1
        if number % 10 == 0 or number == points:
            print(f"{number} of {points} points, {time.monotonic() - began:.0f} s; last {point}", flush=True)
    for title, counter in (("killed at", moments), ("the kill left", left)):
        print(f"{title}:")
        for name, count in counter.most_common():
            print(f"  {count:4}  {name}")
    print(f"{points} kills, nothing lost, all resumed bit for bit")


def what(reference: Reference, point: Point) -> str:
    """A point's moment in words, without the numbers that differ from one to the next."""
    moment = reference.moments[point.background, point.resumed, point.rank][point.kind][point.number - 1]
    return f"{'resume: ' if point.resumed else ''}{without_numbers(moment)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="tests.chaos", description="Kill training runs and compare what is resumed.")
    parser.add_argument("--points", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        try:
            main(arguments.points, arguments.seed, Path(name))
        except AssertionError as error:
            print(error, file=sys.stderr)
            sys.exit(1)

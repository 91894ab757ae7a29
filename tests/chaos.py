"""Let something happen to a training run at a seeded moment, resume it, and compare with an undisturbed run.

    python -m tests.chaos --points 500 --seed 1        # what `make chaos` does
    python -m tests.chaos --points 100 --of mesh

Every point is real: two processes in a gloo group train, save and resume through `fsdp2.train`; four with `--of mesh`,
two that shard times two that split layers. At a file operation (before it, after it, or half-way through a write), in a
training step, or while tensors are copied for an asynchronous save, one of several things happens:

- SIGKILL to one rank or to all, or SIGSTOP to one for a second;
- the run directory is removed, or moved away;
- the disk is full from then on.

In some of the kills `metrics.jsonl` is damaged before the run is resumed. After each:

- every committed checkpoint is whole, and none that the run has reported is lost, unless the directory was removed;
- a run that could not go on has ended on all ranks, without a traceback where it knows the cause;
- the resumed run ends with the losses, step by step and bit for bit, and the weights of the undisturbed one.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.store import Store, verify
from tests.chaos_rank import FAULTS, PATIENCE, Point, moved, rank_main
from tests.harness import PROCESSES, SMALL, imported_once

imported_once("tests.chaos_rank")

STEPS, EVERY, KEEP = 6, 2, 2
# Damage to metrics.jsonl: each takes what is there and gives what is left.
DAMAGES = {
    "cut": lambda content, generator: content[: generator.randrange(len(content) + 1)],
    "zeros": lambda content, generator: _over(content, generator, bytes(200)),
    "noise": lambda content, generator: _over(content, generator, generator.randbytes(200)),
    "gone": lambda content, generator: None,
}


def _over(content: bytes, generator: random.Random, patch: bytes) -> bytes:
    start = generator.randrange(len(content) + 1)
    return content[:start] + patch + content[start + len(patch) :]


@dataclass(frozen=True)
class Kind:
    """A run that things happen to: its ranks, and its flags beside those that say how long it is."""

    ranks: int
    flags: tuple[str, ...]


LLAMA = ("--threads=1", "--device=cpu", "--model=llama", "--model-size=debug", "--dataset=random-tokens")
KINDS = {
    "shards": Kind(2, (*SMALL, "--model=cnn")),
    "mesh": Kind(4, (*LLAMA, "--seq-len=16", "--global-batch-size=12", "--tp=2", "--check-replicas=1")),
}


def run(folder: Path, kind: Kind, name: str, flags: list[str], point: Point | None = None) -> list[int]:
    """Start the ranks and wait for their end; their exit codes."""
    with tempfile.TemporaryDirectory() as meeting:
        line = [*kind.flags, f"--max-steps={STEPS}", f"--checkpoint-every={EVERY}", f"--keep={KEEP}", *flags]
        line += [f"--run-dir={folder / name}"]
        ranks: list[Any] = []
        for rank in range(kind.ranks):
            arguments = (
                rank, kind.ranks, f"{meeting}/store", str(folder / f"{name}-rank{rank}.log"), line, point,
                str(folder / f"{name}-moments{rank}.json"),
            )  # fmt: skip
            ranks.append(PROCESSES.Process(target=rank_main, args=arguments, daemon=True))
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


def records(run_path: Path, kind: str) -> list[dict[str, Any]]:
    """The records of a kind in a metrics file that a kill may have left without its last line's end, or not begun."""
    file = run_path / "metrics.jsonl"
    lines = [line for line in file.read_bytes().splitlines() if line.endswith(b"}")] if file.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def reported(run_path: Path) -> set[int]:
    """Steps whose checkpoints the run has said are committed."""
    return {record["step"] for record in records(run_path, "checkpoint")}


@dataclass
class Reference:
    """Uninterrupted runs to compare with, one to resume from, and how many moments there are."""

    folder: Path
    kind: Kind
    losses: list[tuple[int, float]]
    weights: dict[str, torch.Tensor]
    # (background, resumed, rank) -> the moments of each kind, in order
    moments: dict[tuple[bool, bool, int], dict[str, list[str]]]


def flags_of(background: bool) -> list[str]:
    return ["--async-checkpoint"] if background else []


def prepare(folder: Path, kind: Kind = KINDS["shards"]) -> Reference:
    moments: dict[tuple[bool, bool, int], dict[str, list[str]]] = {}
    whole = [0] * kind.ranks
    assert run(folder, kind, "half", ["--max-steps=3"]) == whole, (folder / "half-rank0.log").read_text()
    for background in (False, True):
        for resumed in (False, True):
            name = f"reference-{background}-{resumed}"
            if resumed:
                shutil.copytree(folder / "half", folder / name)
            assert run(folder, kind, name, flags_of(background)) == whole, (folder / f"{name}-rank0.log").read_text()
            for rank in range(kind.ranks):
                moments[background, resumed, rank] = json.loads((folder / f"{name}-moments{rank}.json").read_text())
    losses = steps_of(folder / "reference-False-False")
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    weights = torch.load(folder / "reference-False-False" / "full_model" / "full-model.pt", weights_only=True)
    return Reference(folder, kind, losses, weights, moments)


def choose(reference: Reference, generator: random.Random) -> Point:
    """A point, and what happens there."""
    background, resumed = generator.random() < 0.5, generator.random() < 0.4
    rank = generator.randrange(reference.kind.ranks)
    kind, number, when = a_moment(reference.moments[background, resumed, rank], generator)
    fault = "kill" if generator.random() < 0.5 else generator.choice(FAULTS)
    both = fault == "kill" and generator.random() < 0.5
    damage = generator.choice(sorted(DAMAGES)) if fault == "kill" and generator.random() < 0.3 else ""
    return Point(kind, number, rank, when, both, background, resumed, fault, damage)


def a_moment(moments: dict[str, list[str]], generator: random.Random) -> tuple[str, int, str]:
    """(kind, number, before or after it or in its midst): first which moment, each as likely as the others, then when.

    Nearly all operations are writes of a few bytes into a shard; the rename of the marker is one of thousands.
    """
    alike: dict[tuple[str, str], list[int]] = {}
    for kind, names in moments.items():
        for number, name in enumerate(names, 1):
            alike.setdefault((kind, without_numbers(name)), []).append(number)
    kind, name = generator.choice(sorted(alike))
    return kind, generator.choice(alike[kind, name]), generator.choice(["before", "after", "torn"])


def without_numbers(moment: str) -> str:
    return re.sub("[0-9]+", "N", moment)


def check(reference: Reference, point: Point) -> str:
    """Let it happen to a run and hold the promises. Raises AssertionError; else says what was left."""
    folder, victim = reference.folder, reference.folder / "victim"
    for path in (victim, moved(victim)):
        shutil.rmtree(path, ignore_errors=True)
    if point.resumed:
        shutil.copytree(folder / "half", victim)
    kind = reference.kind
    codes = run(folder, kind, "victim", flags_of(point.background), point)
    output = "".join((folder / f"victim-rank{rank}.log").read_text() for rank in range(kind.ranks))
    check_end(point, codes, output)
    if moved(victim).exists():
        shutil.rmtree(victim, ignore_errors=True)  # of a moment in which something was about to be written
        moved(victim).rename(victim)
    left = check_what_is_left(point, victim)
    was_damaged = bool(point.damage) and damage_metrics(point, victim)
    if point.fault == "stop":
        assert codes == [0] * kind.ranks, f"{point}: exit codes {codes}\n{output[-3000:]}"
    else:
        codes = run(folder, kind, "victim", flags_of(point.background))
        log = (folder / "victim-rank0.log").read_text()
        assert codes == [0] * kind.ranks, f"{point}: the resumed run failed\n{log[-3000:]}"
    steps = steps_of(victim)
    if was_damaged:  # what was lost stays lost, and the log says so
        missing = [step for step, _ in reference.losses if step not in dict(steps)]
        assert steps == [one for one in reference.losses if one[0] not in missing], f"{point}: the losses differ"
        assert not missing or "metrics.jsonl" in log, f"{point}: steps {missing} are missing without a word"
    else:
        assert steps == reference.losses, f"{point}: the losses differ"
    weights = torch.load(victim / "full_model" / "full-model.pt", weights_only=True)
    assert weights.keys() == reference.weights.keys(), point
    assert all(torch.equal(weights[key], reference.weights[key]) for key in weights), f"{point}: other weights"
    return f"{point.fault}: {left}"


def check_end(point: Point, codes: list[int], output: str) -> None:
    """How the ranks have ended."""
    if point.fault == "kill":
        assert -signal.SIGKILL in codes, f"{point}: no rank was killed, exit codes {codes}"
        return
    known = {"remove": "fsdp2: ", "move": "fsdp2: ", "full": "No space left on device"}
    if point.fault in known and any(codes):
        assert "Traceback" not in output, f"{point}: a traceback\n{output[-3000:]}"
        assert known[point.fault] in output, f"{point}: the cause isn't named\n{output[-3000:]}"


def check_what_is_left(point: Point, victim: Path) -> str:
    """Each committed checkpoint is whole, and none that was reported is lost."""
    store = Store(LocalFiles(victim / "checkpoints"))
    committed = store.committed()
    for step in committed:
        verify(store.checkpoint(step))
    promised = [] if point.fault == "remove" else sorted(reported(victim))
    assert not promised or (committed and committed[-1] >= promised[-1]), (
        f"{point}: {promised} reported, {committed} left"
    )
    lost = [step for step in promised[-KEEP:] if step not in committed and len(committed) < KEEP]
    assert not lost, f"{point}: {lost} lost, {committed} left"
    return f"{len(committed)} committed, {len(store.files.list('')) - len(committed)} dead"


def damage_metrics(point: Point, victim: Path) -> bool:
    """Damage metrics.jsonl as the point says; False if there is nothing yet."""
    path = victim / "metrics.jsonl"
    if not path.exists():
        return False
    content = DAMAGES[point.damage](path.read_bytes(), random.Random(repr(point)))
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    return True


def hold(
    given: argparse.Namespace,
    reference: Any,
    choose: Callable[..., Any],
    check: Callable[..., str],
    outcome: str,
    promise: str,
) -> None:
    """Choose and check the points that are asked for, and print which they were and what `check` says of each.

    Ends this process with status 1 and the reason where the promise isn't held.
    """
    began, generator = time.monotonic(), random.Random(given.seed)
    left: collections.Counter[str] = collections.Counter()
    moments: collections.Counter[str] = collections.Counter()
    for number in range(1, given.points + 1):
        point = choose(reference, generator)
        try:
            left[check(reference, point)] += 1
        except AssertionError as error:
            sys.exit(str(error))
        moments[what(reference, point)] += 1
        if number % 10 == 0 or number == given.points:
            print(f"{number} of {given.points} points, {time.monotonic() - began:.0f} s; last {point}", flush=True)
    for title, counter in (("struck at", moments), (outcome, left)):
        print(f"{title}:")
        for name, count in counter.most_common():
            print(f"  {count:4}  {name}")
    print(f"{given.points} {promise}")


def arguments(prog: str, description: str, points: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--points", type=int, default=points)
    parser.add_argument("--seed", type=int, default=1)
    return parser


def what(reference: Any, point: Point) -> str:
    """A point's moment in words, without the numbers that differ from one to the next."""
    moment = reference.moments[point.background, point.resumed, point.rank][point.kind][point.number - 1]
    return f"{'resume: ' if point.resumed else ''}{without_numbers(moment)}"


if __name__ == "__main__":
    parser = arguments("tests.chaos", "Disturb training runs and compare what is resumed.", 500)
    parser.add_argument("--of", choices=KINDS, default="shards")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        hold(
            given,
            prepare(Path(folder), KINDS[given.of]),
            choose,
            check,
            "left",
            "points, nothing lost, all resumed bit for bit",
        )

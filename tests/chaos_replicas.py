"""Lose a node at a seeded moment of a run with two replicas, and go on from the other's memory.

    python -m tests.chaos_replicas --points 100 --seed 1        # what `make chaos-replicas` does

Four processes are two nodes of two ranks, and each node has a folder of its own for its memory. At a file operation
(before it, after it, or half-way through a write), in a training step or while tensors are copied, one rank gets
SIGKILL and with it the other of its node; most times the node's memory is emptied too, as if another machine took its
place. The ranks of the other node end by themselves. Then all four are started again. Nothing is on the disk until the
run ends, and:

- what they go on from is the newest step in the memory that is left, and the step in which the node was lost;
- losses, step by step and bit for bit, and weights are those of a run that lost nothing.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.store import Store, verify
from fsdp2_extra.elastic import node_memory
from tests.chaos import a_moment, arguments, flags_of, hold, records, steps_of
from tests.chaos_rank import PATIENCE
from tests.chaos_replicas_rank import PER_NODE, RANKS, STEPS, Loss, rank_main
from tests.harness import PROCESSES, imported_once

imported_once("tests.chaos_replicas_rank")


def run(folder: Path, name: str, memory: Path, flags: list[str], point: Loss | None = None) -> list[int]:
    """Start four ranks and wait for their end; their exit codes. A node dies as a whole."""
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (f"{meeting}/store", folder, name, memory, flags, point)
        ranks: list[Any] = [
            PROCESSES.Process(target=rank_main, args=(rank, *arguments), daemon=True) for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 2 * PATIENCE
        try:
            while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
                wait([process.sentinel for process in ranks if process.is_alive()], timeout=1.0)
                if point is not None and ranks[point.rank].exitcode == -signal.SIGKILL:
                    ranks[point.rank ^ 1].kill()
        finally:
            hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
            for process in ranks:
                process.kill()
                process.join()
    assert not hung, f"{point}: ranks {hung} still waited after {2 * PATIENCE:.0f} s"
    return [process.exitcode for process in ranks]


def log(folder: Path, name: str) -> str:
    return "".join((folder / f"{name}-rank{rank}.log").read_text()[-2000:] for rank in range(RANKS))


def in_memory(memory: Path, node: int) -> list[int]:
    """The steps in a node's memory, each of them whole."""
    found = []
    for folder in (memory / f"node{node}").glob("fsdp2-*"):
        store = Store(LocalFiles(folder))
        for step in store.committed():
            verify(store.checkpoint(step))
            found.append(step)
    return found


@dataclass
class Reference:
    """An undisturbed run, one that has lost node 1, and the moments of a run and of one that goes on."""

    folder: Path
    memory: Path
    losses: list[tuple[int, float]]
    weights: dict[str, torch.Tensor]
    moments: dict[tuple[bool, bool, int], dict[str, list[str]]]  # background, resumed, rank


def fresh(memory: Path) -> Path:
    shutil.rmtree(memory, ignore_errors=True)
    for node in range(RANKS // PER_NODE):
        (memory / f"node{node}").mkdir(parents=True)
    return memory


def prepare(folder: Path, memory: Path, backgrounds: Sequence[bool] = (False, True)) -> Reference:
    moments: dict[tuple[bool, bool, int], dict[str, list[str]]] = {}
    lost = Loss("step", 3, rank=2)
    assert -signal.SIGKILL in run(folder, "half", fresh(memory / "half"), [], lost)
    empty(memory / "half", 1)
    for background in backgrounds:
        for resumed in (False, True):
            name = f"reference-{background}-{resumed}"
            here = fresh(memory / "reference")
            if resumed:
                take_half(folder, memory, name, here)
            assert run(folder, name, here, flags_of(background)) == [0] * RANKS, log(folder, name)
            for rank in range(RANKS):
                moments[background, resumed, rank] = json.loads((folder / f"{name}-moments{rank}.json").read_text())
    losses = steps_of(folder / "reference-False-False")
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    weights = torch.load(folder / "reference-False-False" / "full_model" / "full-model.pt", weights_only=True)
    return Reference(folder, memory, losses, weights, moments)


def take_half(folder: Path, memory: Path, name: str, here: Path) -> None:
    """A run that has lost node 1: its folder and memory, under another name."""
    shutil.rmtree(folder / name, ignore_errors=True)
    shutil.copytree(folder / "half", folder / name)
    for source in (memory / "half").glob("node*/fsdp2-*"):
        # A run's folder in memory is named by where its run directory is.
        target = node_memory.memory_folder(str(folder / name), here / source.parent.name)
        shutil.copytree(source, target)


def empty(memory: Path, node: int) -> None:
    shutil.rmtree(memory / f"node{node}")
    (memory / f"node{node}").mkdir()


def choose(reference: Reference, generator: random.Random) -> Loss:
    background, resumed, rank = generator.random() < 0.4, generator.random() < 0.4, generator.randrange(RANKS)
    kind, number, when = a_moment(reference.moments[background, resumed, rank], generator)
    memory = generator.random() < 0.8
    return Loss(kind, number, rank, when, background=background, resumed=resumed, memory=memory)


def check(reference: Reference, point: Loss) -> str:
    """Lose a node and hold the promises. Raises AssertionError; else says what was gone on from."""
    folder, memory = reference.folder, fresh(reference.memory / "victim")
    victim, flags = folder / "victim", flags_of(point.background)
    shutil.rmtree(victim, ignore_errors=True)
    if point.resumed:
        take_half(folder, reference.memory, "victim", memory)
    codes = run(folder, "victim", memory, flags, point)
    assert codes[point.rank] == -signal.SIGKILL, f"{point}: exit codes {codes}\n{log(folder, 'victim')}"
    if point.memory:
        empty(memory, point.node)
    left = max([step for node in range(RANKS // PER_NODE) for step in in_memory(memory, node)], default=0)
    on_disk = max(Store(LocalFiles(victim / "checkpoints")).committed(), default=0)
    logged = max((record["step"] for record in records(victim, "train")), default=0)
    codes = run(folder, "victim", memory, flags)
    assert codes == [0] * RANKS, f"{point}: the run that went on failed\n{log(folder, 'victim')}"
    kind, step, place = json.loads((folder / "victim-begin.json").read_text())
    assert step == max(left, on_disk), f"{point}: {step} gone on from, {left} in memory, {on_disk} on the disk"
    assert (kind, "fsdp2-" in (place or "")) == ("resume" if step else "start", left > on_disk), f"{point}: {place}"
    # Node 0 may be lost while node 1, which was lost before, has not all of its memory yet: then both copies are lost.
    both = point.resumed and point.memory and point.node == 0 and not step
    # A step is logged before it is kept; in the background, another one may run while it is kept.
    assert both or logged - step <= 1 + point.background, f"{point}: {logged} was logged, and {step} gone on from"
    assert steps_of(victim) == reference.losses, f"{point}: the losses differ"
    weights = torch.load(victim / "full_model" / "full-model.pt", weights_only=True)
    assert all(torch.equal(weights[key], reference.weights[key]) for key in reference.weights), (
        f"{point}: other weights"
    )
    assert not list(memory.glob("node*/*")), f"{point}: the memory isn't given back"
    if both:
        return "from the start, since both copies were lost"
    return f"from {'memory' if left > on_disk else 'the disk' if on_disk else 'the start'}, {logged - step} steps again"


if __name__ == "__main__":
    given = arguments("tests.chaos_replicas", "Lose nodes of runs with two replicas.", 100).parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
        tempfile.TemporaryDirectory(prefix="chaos-", dir="/dev/shm") as memory,
    ):
        reference = prepare(Path(folder), Path(memory))
        hold(given, reference, choose, check, "went on", "nodes lost, all runs went on bit for bit")

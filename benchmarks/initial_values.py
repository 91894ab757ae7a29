"""The cost of a model's initial values on a rank:  python -m benchmarks.initial_values

Two ways, in turn: each rank draws every tensor whole and keeps its rows, or it draws its rows alone. Of every number
of ranks the part of rank 0 is drawn, in a process of its own and without a group: no rank waits for another.

With --threads N, the whole model is drawn on 1 to N threads of this process, as a run of one rank does it.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import torch

from benchmarks.tables import machine, spread
from fsdp2 import models
from fsdp2.models.initial import fill_for, reset_parameters, rows_of

RANKS = (1, 2, 8, 64, 1024)
SIZE = "wide"


def draw(ranks: int, whole: bool) -> tuple[float, int]:
    """Seconds, and MiB by which the peak of this process has grown beside the shards themselves."""
    spec = models.get("transformer")
    with torch.device("meta"):
        model = spec.build(SIZE)
    torch.set_num_threads(1)
    shards = {name: torch.empty(-(-len(p) // ranks), *p.shape[1:]).zero_() for name, p in model.named_parameters()}
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    for name, parameter in model.named_parameters():
        fill, mine = fill_for(spec.initial_values, name), shards[name]
        rows = slice(0, len(parameter) if whole else len(mine))
        mine.copy_(rows_of(fill, name, parameter.shape, torch.float32, 1, rows)[: len(mine)])
    seconds = time.perf_counter() - began
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024


def measured(ranks: int, whole: bool) -> tuple[float, int]:
    line = [sys.executable, "-m", "benchmarks.initial_values", f"--ranks={ranks}", *(["--whole"] if whole else [])]
    seconds, mebibytes = subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()
    return float(seconds), int(mebibytes)


def on_threads(most: int, rounds: int) -> None:
    """Print a line for 1, 2, 4, … threads: nanoseconds an element, of the wall clock and of all processors together."""
    spec = models.get("transformer")
    model = spec.build(SIZE)
    count = sum(p.numel() for p in model.parameters())
    print("| threads | wall clock, ns | processors, ns |\n|---:|---:|---:|")
    numbers = [2**power for power in range(most.bit_length()) if 2**power <= most]
    times: dict[int, list[tuple[float, float]]] = {number: [] for number in numbers}
    for number in numbers * rounds:
        torch.set_num_threads(number)
        wall, computing = time.perf_counter(), time.process_time()
        reset_parameters(model, spec.initial_values, seed=1)
        spent = time.perf_counter() - wall, time.process_time() - computing
        times[number].append((spent[0] / count * 1e9, spent[1] / count * 1e9))
    for number, found in times.items():
        wall_times, computing_times = zip(*found, strict=True)
        print(f"| {number} | {spread(list(wall_times))} | {spread(list(computing_times))} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, help="draw the part of rank 0 of so many, and print seconds and MiB")
    parser.add_argument("--whole", action="store_true", help="draw every tensor whole")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="draw the whole model on 1 to so many threads")
    given = parser.parse_args()
    if given.threads:
        on_threads(given.threads, given.rounds)
        return
    if given.ranks:
        print(*draw(given.ranks, given.whole))
        return
    with torch.device("meta"):
        count = sum(p.numel() for p in models.get("transformer").build(SIZE).parameters())
    print(f"`transformer`, size `{SIZE}`, {count:,} parameters; torch {torch.__version__}; {machine()}; one thread.")
    print("Seconds: median (least–most) of the rounds. MiB: the growth of the peak beside the shards.\n")
    print("| ranks | every tensor whole, s | own rows, s | ratio | whole, MiB | own rows, MiB |")
    print("|---:|---:|---:|---:|---:|---:|")
    for ranks in RANKS:
        rounds = [(measured(ranks, True), measured(ranks, False)) for _ in range(given.rounds)]
        whole, own = ([seconds for seconds, _ in side] for side in zip(*rounds, strict=True))
        ratio = spread([a / b for a, b in zip(whole, own, strict=True)])
        peaks = [max(mebibytes for _, mebibytes in side) for side in zip(*rounds, strict=True)]
        print(f"| {ranks:,} | {spread(whole)} | {spread(own)} | {ratio} | {peaks[0]} | {peaks[1]} |", flush=True)


if __name__ == "__main__":
    main()

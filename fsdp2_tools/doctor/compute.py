"""The speed of each rank in a product of matrices and a copy in memory. A straggler is named."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fsdp2_tools.doctor.asking import Asker, Here
from fsdp2_tools.doctor.judging import WORSE, Hosts, Row, beside_median, far_above

TIMES_SLOWER = 2.0  # than the median rank: all ranks wait for the slowest one in each step
AGAIN = 3  # measurements in which a rank has to be slow: what else runs on a machine makes any rank late once
SIZES = {"cpu": (512, torch.float32, 128 << 20), "cuda": (8192, torch.bfloat16, 1 << 30)}


def measure(here: Here, seconds: float) -> dict[str, float]:
    """`flops` of a product of matrices and `memory`, bytes/s read and written by a copy, each over so many seconds.

    The mean counts and not the best: a rank whose CPU time is limited is quick until its share is used up.
    """
    kind = here.device.type
    n, dtype, count = SIZES[kind]
    a = torch.ones(n, n, dtype=dtype, device=here.device)
    source = torch.ones(count, dtype=torch.uint8, device=here.device)
    target = torch.empty_like(source)
    out = torch.empty_like(a)
    here.doing = "multiplying matrices"
    flops = 2 * n**3 * _rate(lambda: torch.mm(a, a, out=out), here.device, seconds)
    here.doing = "copying memory"
    return {"flops": flops, "memory": 2 * count * _rate(lambda: target.copy_(source), here.device, seconds)}


def _rate(work: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Repetitions a second."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    wait()
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(4):  # so that a GPU isn't kept waiting for the clock
            work()
        done += 4
        wait()
    return done / (time.perf_counter() - began)


def ask_compute(asker: Asker, seconds: float) -> dict[int, dict[str, float]]:
    """By rank the best of up to three measurements; a second one only if a rank seems slow in the first."""
    best: dict[int, dict[str, float]] = {}
    for _ in range(AGAIN):
        for rank, one in asker.ask("compute", seconds=seconds).items():
            before = best.get(rank, one)
            best[rank] = {name: max(value, before[name]) for name, value in one.items()}
        if not any(stragglers(best, name) for name in ("flops", "memory")):
            break
    return best


def stragglers(found: Mapping[int, Mapping[str, float]], name: str) -> list[int]:
    return far_above({rank: 1 / one[name] for rank, one in found.items()}, TIMES_SLOWER)


def rows(found: Mapping[int, Mapping[str, float]], hosts: Hosts) -> list[Row]:
    """Judge all ranks' rates."""
    fix = "look what else runs there, at its CPU quota, and at its GPU's clocks and heat"
    result = []
    for name, title, unit in (("flops", "matrix product", "{:.3g} TFLOP/s"), ("memory", "copy", "{:.3g} GB/s")):
        rates = [one[name] / (1e12 if name == "flops" else 1e9) for one in found.values()]
        if rates:
            row = beside_median(title, rates, min, unit.format)
            result.append(row.judged(stragglers(found, name), hosts, WORSE, fix))
    return result

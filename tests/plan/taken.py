"""What a run has taken, by its own ledger, and what a plan says of it."""

from __future__ import annotations

from pathlib import Path

from fsdp2.config import parse
from fsdp2.memory.timeline import load
from fsdp2.plan.memory import Memory, memory_of, run


def taken(folder: Path, rank: int) -> int:
    """The most bytes of a run's steps and evaluation."""
    line = load((folder / f"rank{rank}_memory_timeline.json.gz").read_bytes())
    most = total = 0
    for when, change, _ in line.changes():
        total += change
        if line.phase_at(when).name not in ("checkpoint", "full model", "between"):
            most = max(most, total)
    return most


def planned(flags: str, ranks: int = 2, rank: int = 0, *, gpu: bool = False) -> Memory:
    """What flags need as one rank of many, on CPUs or on GPUs."""
    config = parse(flags.split())
    return memory_of(config, rank, run(config, ranks, rank, gloo=not gpu), offload_apart=gpu)

"""What a run has taken, by its own ledger."""

from __future__ import annotations

from pathlib import Path

from fsdp2.memory.timeline import load


def taken(run: Path, rank: int) -> int:
    """The most bytes of a run's steps and evaluation."""
    line = load((run / f"rank{rank}_memory_timeline.json.gz").read_bytes())
    most = total = 0
    for when, change, _ in line.changes():
        total += change
        if line.phase_at(when).name not in ("checkpoint", "between"):
            most = max(most, total)
    return most

"""Starts trials and reads what they leave. A trial that ends the process is a result, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from fsdp2.options.own_model import code_flags
from fsdp2.options.parser import to_flags
from fsdp2_tools.compare.measure import reason, torchrun
from fsdp2_tools.tune.rounds import Candidate, Measure, Record

SIGKILLED = "exitcode  : -9"  # as torchrun words it
KILLED = "killed, perhaps because memory ran out"
# Runs fsdp2_tools.tune.trial on all ranks with the job in a file. Returns why that failed, else None.
Launch = Callable[[Path], str | None]


def on_ranks(launch: Launch, folder: Path, *, together: bool, say: Callable[[str], None]) -> Measure:
    """Make a function that measures candidates, by files in a folder that all ranks see. With `together`, all of a
    round share the memory and take their steps in turn.
    """
    launches = iter(range(10**6))

    def measure(candidates: Sequence[Candidate], steps: int) -> list[Record | None]:
        found: list[Record | None] = [None] * len(candidates)
        left = [number for number, one in enumerate(candidates) if one.failed is None]
        while left:
            out = folder / f"launch-{next(launches)}.jsonl"
            why = launch(_job([candidates[number] for number in left], steps, together, folder, out))
            records = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
            for record in records:
                if "failed" in record:
                    _out(candidates[left[record["trial"]]], record["failed"], say)
                elif "trial" in record:
                    found[left[record["trial"]]] = record
            if why is None:
                break
            if not any(record.get("ended") for record in records):
                # The trial that has ended the process without a word is the last that was begun and has not failed.
                begun = [record["begun"] for record in records if "begun" in record] or [0]
                last = next((n for n in reversed(begun) if candidates[left[n]].failed is None), 0)
                _out(candidates[left[last]], why, say)
            left = [number for number in left if found[number] is None and candidates[number].failed is None]
        return found

    return measure


def _out(one: Candidate, why: str, say: Callable[[str], None]) -> None:
    if one.failed is None:
        one.failed = why
        say(f"{one.name}: {why}")


def _job(candidates: Sequence[Candidate], steps: int, together: bool, folder: Path, out: Path) -> Path:
    """The file that tells a launch what to try."""
    settings = []
    for index, one in enumerate(candidates):
        file = folder / f"{index}.json"
        file.write_text(json.dumps({"flags": to_flags(one.config)}))
        settings.append([f"--config={file}", *code_flags(one.config)])
    peak = any(one.peak_bytes == 0 for one in candidates)
    job = {"settings": settings, "steps": steps, "together": together, "peak": peak, "out": str(out)}
    (folder / "job.json").write_text(json.dumps(job))
    return folder / "job.json"


def by_torchrun(ranks: int) -> Launch:
    """Launches on this machine."""

    def launch(job: Path) -> str | None:
        result = torchrun(ranks, "fsdp2_tools.tune.trial", str(job))
        if result.returncode == 0:
            return None
        output = result.stderr + result.stdout
        return KILLED if SIGKILLED in output else reason(output)

    return launch

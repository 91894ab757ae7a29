"""metrics.jsonl as a reader sees it, and the records that can be kept of a damaged one."""

from __future__ import annotations

import json
import mmap
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

# Longer than any record. A line without an end is not read into memory.
LONGEST_LINE = 1 << 20
_TAIL_BYTES = 1 << 16


def parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if it is torn or no record."""
    try:
        record = json.loads(line.decode(), parse_constant=_refuse) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def read(path: Path) -> list[dict[str, Any]]:
    """All records. Raises ValueError that names the first line which is none, OSError if there is no such file."""
    found = []
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
            record = parse(line)
            if record is None:
                raise ValueError(f"{path}: line {number} is no whole record; resuming the run repairs the file")
            found.append(record)
    return found


def is_whole(file: BinaryIO, position: int, step: int) -> bool:
    """Whether a file still is, up to `position`, as a checkpoint of `step` left it.

    Its last step must be that one, and no part of it zeros, as a power cut or a longer `truncate` leaves them. Earlier
    lines are not parsed, since there may be millions.
    """
    if position == 0:
        return True
    if file.seek(0, 2) < position:
        return False
    start = max(0, position - _TAIL_BYTES)
    file.seek(start)
    tail = file.read(position - start)
    if not tail.endswith(b"\n"):
        return False
    records = (parse(line) for line in reversed(tail.splitlines(keepends=True)))
    last = next((record for record in records if record is not None and record["kind"] == "train"), {})
    with mmap.mmap(file.fileno(), position, access=mmap.ACCESS_READ) as content:
        return last.get("step") == step and content.find(b"\0") < 0


def readable(file: BinaryIO, step: int) -> tuple[bytes, str]:
    """The lines of a damaged file that can be kept up to a checkpoint of `step`, and a line that says what is missing.

    Each step stands in them once.
    """
    file.seek(0)
    kept: list[bytes] = []
    steps: set[int] = set()
    first = at = 0
    for line in iter(lambda: file.readline(LONGEST_LINE), b""):
        record = parse(line)
        if record is None:
            continue
        kind = record["kind"]
        at = record["step"] if type(record.get("step")) is int else at
        if at > step or (kind == "train" and at in steps):
            continue
        if kind == "train":
            steps.add(at)
        elif kind in ("start", "resume") and not kept:
            first = at  # a run that went on from another's checkpoint has no earlier steps
        kept.append(line)
        if kind == "checkpoint" and at == step:
            break  # later records of this step are those of a resume, or of an end
    return b"".join(kept), f"metrics.jsonl was damaged and is repaired: {_missing(sorted(steps), first, step)}"


def _missing(steps: list[int], first: int, last: int) -> str:
    gaps = [(a + 1, b - 1) for a, b in pairwise([first, *steps, last + 1]) if b - a > 1]
    if not gaps:
        return "no step is missing from it"
    named = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in gaps[:3])
    more = f" and {len(gaps) - 3} further gaps" if len(gaps) > 3 else ""
    one = len(gaps) == 1 and gaps[0][0] == gaps[0][1]
    return f"{'step' if one else 'steps'} {named}{more} {'is' if one else 'are'} missing from it"

"""metrics.jsonl as a reader sees it, and the records that can be kept of a damaged one."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

# Longer than any record. A line without an end is not read into memory.
LONGEST_LINE = 1 << 20
USUAL_LINE = 1 << 12  # longer than a `train` record, with what stands between two of them


def parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if it is torn or no record."""
    try:
        record = _JSON.decode(line.decode()) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not (isinstance(record, dict) and isinstance(record.get("kind"), str)):
        return None
    step = record.get("step", None if record["kind"] == "train" else 0)  # a failure's record may have none
    return record if type(step) is int and step >= 0 else None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse)


def read(path: Path) -> list[dict[str, Any]]:
    """All records, with NaN for each number of a step that JSON had none for.

    Raises ValueError that names the first line which is none, OSError if there is no such file.
    """
    found = []
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
            record = parse(line)
            if record is None:
                raise ValueError(f"{path}: line {number} is not a complete record; resuming the run repairs the file")
            numbers = record["kind"] in ("train", "eval")
            found.append({key: math.nan if numbers and value is None else value for key, value in record.items()})
    return found


def is_whole(file: BinaryIO, position: int, step: int) -> bool:
    """True if a file still is, up to `position`, as a checkpoint of `step` left it: records whose steps go up to it.

    Every line is parsed, since damage may be anywhere: a second for each 300,000.
    """
    at, last = file.seek(0), 0
    while at < position:
        line = file.readline(LONGEST_LINE)
        record = parse(line)
        if record is None or (record["kind"] == "train" and record["step"] <= last):
            return False
        last = record["step"] if record["kind"] == "train" else last
        at += len(line)
    return at == position and (position == 0 or last == step)


def readable(file: BinaryIO, step: int) -> tuple[bytes, str]:
    """The lines of a damaged file that can be kept up to a checkpoint of `step`, and a line that says what is missing.

    They are in the order of steps, and each step stands in them once.
    """
    file.seek(0)
    # Line -> step, whether it comes behind that step's own record, kind.
    kept: dict[bytes, tuple[int, bool, str]] = {}
    steps: set[int] = set()
    first = at = 0
    for line in iter(lambda: file.readline(LONGEST_LINE), b""):
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            break  # a hole in a file may be of terabytes
        record = parse(line)
        if record is None:
            continue
        kind = record["kind"]
        at = record.get("step", at)
        if at > step or (kind == "train" and at in steps):
            continue
        if kind == "train":
            steps.add(at)
        elif kind in ("start", "resume") and not kept:
            first = at  # a run that went on from another's checkpoint has no earlier steps
        kept.setdefault(line, (at, kind != "train", kind))
    lines = sorted(kept, key=lambda line: kept[line][:2])
    # Records behind that of the checkpoint are those of a resume, or of an end.
    saved = [n for n, line in enumerate(lines, 1) if kept[line] == (step, True, "checkpoint")]
    missing = _missing(sorted(steps), first, step)
    return b"".join(lines[: saved[0]] if saved else lines), f"metrics.jsonl was damaged and is repaired: {missing}"


def _missing(steps: list[int], first: int, last: int) -> str:
    gaps = [(a + 1, b - 1) for a, b in pairwise([first, *steps, last + 1]) if b - a > 1]
    if not gaps:
        return "no step is missing from it"
    named = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in gaps[:3])
    more = f" and {len(gaps) - 3} further gaps" if len(gaps) > 3 else ""
    one = len(gaps) == 1 and gaps[0][0] == gaps[0][1]
    return f"{'step' if one else 'steps'} {named}{more} {'is' if one else 'are'} missing from it"

"""metrics.jsonl: whatever has happened to it, a resume leaves records that parse, in order, and loses none that was
whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fsdp2.report import records
from fsdp2.report.metrics import MetricsFile
from tests.fuzz.common import one_line, trials
from tests.fuzz.damage import VALUES, changed, damaged
from tests.fuzz.runs import Stage

LOOKS = ["resume", "resume the older"]


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """The records of a run, which may go on from another's checkpoint, and may have been resumed."""
    first = step = draw(st.sampled_from([0, 0, 7]))
    found: list[dict[str, Any]] = [
        {"kind": "resume" if first else "start", "step": first, "note": draw(st.sampled_from([None, "é", "x" * 99]))}
    ]
    for _ in range(draw(st.integers(1, 12))):
        step += 1
        found.append({"kind": "train", "step": step, "loss": draw(st.floats(0, 9)), "lr": 0.1})
        kinds = st.sampled_from(["eval", "checkpoint", "failure", "resume", "end"])
        found += [{"kind": kind, "step": step} for kind in draw(st.lists(kinds, max_size=2))]
    return found


@st.composite
def damaged_lines(draw: st.DrawFn, lines: list[bytes]) -> bytes:
    """Lines that are missing, doubled, in another order, of other records, torn, or full of zeros and noise."""
    for _ in range(draw(st.integers(1, 3))):
        at, to = sorted(draw(st.tuples(*[st.integers(0, len(lines))] * 2)))
        lines = [*lines[:at], *draw(_changed_part(lines[at:to])), *lines[to:]]
    return draw(damaged(b"".join(lines))) if draw(st.integers(0, 3)) == 0 else b"".join(lines)


@st.composite
def _changed_part(draw: st.DrawFn, part: list[bytes]) -> list[bytes]:
    how = draw(st.sampled_from(["cut", "double", "reverse", "move", "zeros", "noise", "record"]))
    if how == "record":
        found = [record for line in part[:3] if (record := records.parse(line))]
        return [json.dumps(draw(st.one_of(VALUES, changed(record)))).encode() + b"\n" for record in found]
    return {
        "cut": [],
        "double": part * 2,
        "reverse": part[::-1],
        "move": [*part[1:], *part[:1]],
        "zeros": [bytes(sum(map(len, part)))],
        "noise": [draw(st.binary(max_size=20)) + draw(st.sampled_from([b"", b"\n"])), *part],
    }[how]


def _lines(content: bytes) -> list[bytes]:
    return [line + b"\n" for line in content.split(b"\n")[:-1]]  # `splitlines` also splits at a carriage return


@given(st.data())
@trials(400)
def test_repairs(tmp_path: Path, data: st.DataObject) -> None:
    history = data.draw(histories())
    lines = [json.dumps(record).encode() + b"\n" for record in history]
    at = data.draw(st.sampled_from([i for i, record in enumerate(history) if record["kind"] == "train"]))
    step, position = history[at]["step"], len(b"".join(lines[: at + 1]))
    content = data.draw(damaged_lines(lines))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    file = MetricsFile(path, rank=0)
    note = file.cut(position, step)
    file("train", {"step": step + 1})
    file.close()
    if note is not None:
        one_line(note)
    found = [record["step"] for record in records.read(path) if record["kind"] == "train"]
    assert found == sorted(set(found))
    assert found[-1] == step + 1
    assert all(number <= step for number in found[:-1])
    kept = _lines(path.read_bytes())
    # Without damage before the position, what stands behind it is of steps that are done again.
    there = _lines(content if note else content[:position])
    lost = [line for line, record in zip(lines, history, strict=True)
            if record["kind"] == "train" and record["step"] <= step and line in there and line not in kept]  # fmt: skip
    others = {
        record["step"] for one in there if (record := records.parse(one)) and one not in lines and "step" in record
    }
    assert all(json.loads(line)["step"] in others for line in lost), lost  # a forged record of its step came first


@given(st.data())
@trials(15)
def test_resumes(stage: Stage, data: st.DataObject) -> None:
    path = stage.set() / "metrics.jsonl"
    path.write_bytes(data.draw(damaged_lines(_lines(path.read_bytes()))))
    stage.look(*data.draw(st.lists(st.sampled_from(LOOKS), min_size=1, max_size=2)))
    steps = [record["step"] for record in records.read(path) if record["kind"] == "train"]
    assert steps == sorted(set(steps))

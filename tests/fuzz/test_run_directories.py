"""A run's folder: entries that are other things, missing, renamed or strangers', and files that are damaged."""

from __future__ import annotations

import gzip
import json
import os
from contextlib import suppress
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fsdp2_extra.allocations.timeline import load
from fsdp2_tools.memory.__main__ import summary
from tests.fuzz.common import trials
from tests.fuzz.damage import changed, damaged
from tests.fuzz.runs import KINDS, READERS, WRITERS, Stage, remove

STEPS = ["step-00000001", "step-00000003", "step-00000009", "step-9", "step-99999999999999999999", "step-0000000²"]
STEPS += [
    "step-00000000",
    "step-000000003",
    "superseded-1-step-00000003",
    "superseded-9-step-00000009",
    "step-00000002 ",
]
STEPS += ["superseded-1-superseded-1-step-00000001", "Ä\u202e\x1b[31m", "a\nb", "x" * 255, ".tmp", "step-٠٠٠٠٠٠٠٤"]
STEPS += ["superseded-" + "9" * 200 + "-step-00000001", "step-" + "9" * 240]


def _change(data: st.DataObject, run: Path) -> None:
    entries = sorted(path for path in run.rglob("*") if path.is_relative_to(run))
    path = data.draw(st.sampled_from([run, *entries]))
    how = data.draw(st.sampled_from(["kind", "kind", "kind", "rename", "add", "damage", "step", "link"]))
    other = path.with_name(data.draw(st.sampled_from(STEPS)))
    if how == "add" or (how == "rename" and path != run):
        folder = path if path.is_dir() and not path.is_symlink() else path.parent
        other = folder / other.name
    if how == "kind":
        remove(path)
        KINDS[data.draw(st.sampled_from(sorted(KINDS)))](path)
    elif how == "add" and not os.path.lexists(other):
        KINDS[data.draw(st.sampled_from(sorted(KINDS)))](other)
    elif how == "rename" and path != run and not os.path.lexists(other) and not other.is_relative_to(path):
        path.rename(other)
    elif how == "damage" and path.is_file() and not path.is_symlink():
        content = path.read_bytes() if path.stat().st_size < 1 << 20 else b""
        remove(path)
        path.write_bytes(data.draw(damaged(content)))
    elif how in ("step", "link"):
        steps = run / "checkpoints"
        target = steps / data.draw(st.sampled_from(STEPS))
        if steps.is_dir() and not steps.is_symlink() and not os.path.lexists(target):
            made = data.draw(st.sampled_from(sorted(path.name for path in steps.iterdir()) or ["nothing"]))
            target.symlink_to(made) if how == "link" else (steps / made).exists() and (steps / made).rename(target)


@given(st.data())
@trials(50)
def test_commands(stage: Stage, data: st.DataObject) -> None:
    run = stage.set()
    for _ in range(data.draw(st.integers(1, 2))):
        if run.is_dir() and not run.is_symlink():
            _change(data, run)
    looks = st.sampled_from([*sorted(READERS), *sorted(WRITERS) * 2])
    stage.look(*data.draw(st.lists(looks, min_size=1, max_size=2, unique=True)))


@given(st.data())
@trials(150)
def test_timelines(stage: Stage, data: st.DataObject) -> None:
    """What `fsdp2.memory` reads of a run: gzipped JSON."""
    packed = next(stage.finished.glob("*timeline.json.gz")).read_bytes()
    if data.draw(st.booleans()):
        content = json.loads(gzip.decompress(packed))
        packed = gzip.compress(json.dumps(data.draw(changed(content))).encode(), 1)
    else:
        packed = data.draw(damaged(packed))
    with suppress(ValueError):
        summary([load(packed)])

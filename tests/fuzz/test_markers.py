"""COMMIT.json, of a checkpoint and of the full model: whatever it says, and whatever stands in its place."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.store import HASH, MARKER, DamagedCheckpoint, read_marker, write_marker
from tests.fuzz.common import trials
from tests.fuzz.damage import changed, damaged
from tests.fuzz.runs import KINDS, Stage, remove

LOOKS = ["list", "verify", "verify one", "show", "show the model", "diff", "export", "export the model", "import"]
LOOKS += ["infer", "infer sharded", "resume", "resume the older", "resume never", "resume elsewhere", "init from"]


def _forged(content: Any) -> dict[str, Any]:
    """What a marker holds beside the hash of itself, which whoever forges one makes as well."""
    return {key: value for key, value in content.items() if key != HASH}


def _change(data: st.DataObject, folder: LocalFiles) -> None:
    path = folder.root / MARKER
    sound = path.read_bytes()
    how = data.draw(st.sampled_from(["forged"] * 3 + ["said", "bytes", "doubled", "kind"]))
    content = data.draw(changed(_forged(json.loads(sound)))) if how in ("forged", "said") else None
    remove(path)
    if how == "kind":
        KINDS[data.draw(st.sampled_from(sorted(KINDS)))](path)
    elif how == "forged" and isinstance(content, dict):
        write_marker(folder, content)
    elif how == "doubled":
        path.write_bytes(sound.replace(b"{", b'{"step": 1, "files": {}, ', 1))
    else:
        path.write_bytes(data.draw(damaged(sound)) if how == "bytes" else json.dumps(content).encode())


@given(st.data())
@trials(200)
def test_reading(stage: Stage, data: st.DataObject) -> None:
    stage.set()
    _change(data, LocalFiles(stage.step))
    with suppress(DamagedCheckpoint):
        read_marker(LocalFiles(stage.step))


@given(st.data())
@trials(40)
def test_commands(stage: Stage, data: st.DataObject) -> None:
    run = stage.set()
    _change(data, LocalFiles(data.draw(st.sampled_from([stage.step, stage.step, run / "full_model"]))))
    stage.look(*data.draw(st.lists(st.sampled_from(LOOKS), min_size=1, max_size=3, unique=True)))

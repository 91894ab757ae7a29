"""What tests of strangers' files share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.sources.dcp_tensors import DcpTensors
from fsdp2.checkpoint.store import HASH, MARKER, fingerprint, read_marker, write_marker
from fsdp2.config import parse
from fsdp2.train import main
from fsdp2_tools.checkpoint.dcp_write import write_dcp
from tests.harness import small


def checkpoint_of(run: Path) -> LocalFiles:
    return LocalFiles(run / "checkpoints" / "step-00000001")


def vouch(checkpoint: LocalFiles, **changes: Any) -> None:
    """A marker whose hashes are right: who makes a hostile checkpoint makes that too."""
    marker = {key: value for key, value in read_marker(checkpoint).items() if key != HASH}
    there = [path.name for path in checkpoint.root.iterdir() if path.is_file() and path.name != MARKER]
    write_marker(checkpoint, {**marker, "files": {name: fingerprint(checkpoint, name) for name in there}, **changes})


def change_values(checkpoint: LocalFiles, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a checkpoint again with other tensors or values, and vouch for it."""
    with closing(DcpTensors(checkpoint)) as found:
        state = {name: found.read(name) for name in found.paths}
        paths = dict(found.paths)
    change(state)
    for path in checkpoint.root.iterdir():
        if path.name != MARKER:
            path.unlink()
    places = {name: paths.get(name, tuple(name.split(".", 2))) for name in state}
    write_dcp(checkpoint, {}, state, places, lambda name: state[name])
    vouch(checkpoint)


def resume(*runs: str) -> list[str]:
    """How each run's resume ends, on this rank. In `Ranks`."""
    ends = []
    for run in runs:
        try:
            main(parse(small(run, "--max-steps=2")))
            ends.append("resumed")
        except Exception as error:
            ends.append(f"{type(error).__name__}: {error}")
    return ends


def one_line(error: BaseException, *parts: str) -> None:
    """Assert that a refusal is one, with these parts in it."""
    for part in parts:
        assert part in str(error)
    assert "\n" not in str(error)
    assert "Traceback" not in str(error)

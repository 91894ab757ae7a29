"""Ranks on several nodes: all must see the folder that rank 0 writes to."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp2 import preflight
from fsdp2.config import parse
from fsdp2.options import ConfigError
from fsdp2.rundir import WriterLock
from fsdp2.train import main
from tests.harness import Ranks, small


def _on_a_node_without_the_folder(run: Path, elsewhere: Path) -> str:
    """Train, with another file system below the run directory's path on rank 1; this rank's refusal."""
    elsewhere.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            seen = functools.partial(WriterLock.is_seen, elsewhere, seconds=0.5)
            patch.setattr(preflight.WriterLock, "is_seen", lambda path, token: seen(token))
        with pytest.raises(ConfigError) as caught:
            main(parse(small(run, "--max-steps=1")))
    return str(caught.value)


@pytest.mark.parametrize("there", ["nothing", "another run's folder"])
def test_a_folder_that_a_rank_does_not_see_is_refused_by_all(ranks: Ranks, tmp_path: Path, there: str) -> None:
    if there != "nothing":
        (tmp_path / "elsewhere").mkdir()
        WriterLock(tmp_path / "elsewhere").release()
    first, second = ranks.run(_on_a_node_without_the_folder, tmp_path / "run", tmp_path / "elsewhere")
    assert first == second
    assert f"--run-dir {tmp_path / 'run'}: 1 ranks, on " in first
    assert "give a folder that all nodes share, or a URL" in first
    assert "\n" not in first
    assert not (tmp_path / "run").exists(), "nothing was trained there"


def test_a_writer_is_seen_as_soon_as_a_slow_file_system_shows_it(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path / "run")
    calls: list[Any] = []
    real = Path.read_text

    def late(path: Path, *arguments: Any) -> str:
        calls.append(path)
        if len(calls) == 1:
            raise FileNotFoundError(path)
        return real(path, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", late)
        assert WriterLock.is_seen(tmp_path / "run", lock.token)
    assert len(calls) == 2
    lock.release()

"""Ranks on several nodes: all must see the folder that rank 0 writes to."""

from __future__ import annotations

import errno
import functools
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.directory import hold
from fsdp2.run.directory import lock as lock_module
from fsdp2.run.directory.lock import WriterLock
from fsdp2.run.directory.rundir import RunDir
from fsdp2.train import main
from tests.harness import Ranks, small


def _on_a_node_without_the_folder(run: Path, elsewhere: Path) -> str:
    """Train, with another file system below the run directory's path on rank 1; this rank's refusal."""
    elsewhere.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            seen = functools.partial(WriterLock.is_seen, elsewhere, seconds=0.5)
            patch.setattr(hold.WriterLock, "is_seen", lambda path, token, **_: seen(token))
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


def test_runs_without_a_name_that_begin_at_once_have_a_folder_each(tmp_path: Path) -> None:
    """All have chosen the same free name before the first makes it."""
    (tmp_path / "runs").mkdir()
    holds = [hold.Hold(RunDir(tmp_path / "runs" / "vit-20261124-020826")) for _ in range(3)]
    for one in holds:
        one.take(new=True)
    names = ["vit-20261124-020826", "vit-20261124-020826-2", "vit-20261124-020826-3"]
    assert [one.run.path.name for one in holds] == names
    for one in holds:
        one.release(refused=True)
    assert not any((tmp_path / "runs").iterdir()), "nothing was trained there"


def test_a_writer_is_seen_as_soon_as_a_slow_file_system_shows_it(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path / "run")
    calls: list[Path] = []
    said: list[str] = []
    real = Path.read_bytes

    def late(path: Path) -> bytes:
        calls.append(path)
        if len(calls) < 3:
            raise OSError(errno.ESTALE, "Stale file handle") if len(calls) == 1 else FileNotFoundError(path)
        return real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", late)
        patch.setattr(lock_module, "_SECONDS_IN_SILENCE", 0.0)
        assert WriterLock.is_seen(tmp_path / "run", lock.token, say=said.append)
    assert len(calls) == 3
    assert len(said) == 1, "what is waited for is said once"
    assert f"waiting up to 90 s to see what rank 0 has written to {tmp_path / 'run'}" in said[0]
    lock.release()


@pytest.mark.parametrize("kind", ["nfs4", "ext4"])
def test_the_lock_of_a_node_that_has_died_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """Only where a server may still hold it: on a machine's own disk a lock is that of a living process."""
    monkeypatch.setattr(lock_module, "file_system", lambda folder: kind)
    held = WriterLock(tmp_path)
    if kind == "ext4":
        with pytest.raises(ConfigError, match="in use by a run"):
            WriterLock(tmp_path)
        return
    expiry = threading.Timer(0.8, held.release)
    expiry.start()
    WriterLock(tmp_path).release()
    expiry.join()
    assert "in use; waiting up to 120 s, since nfs4 keeps the lock of a node that has died" in capfd.readouterr().err
    monkeypatch.setattr(lock_module, "SECONDS_OF_THE_DEAD", 0.2)
    held = WriterLock(tmp_path)
    with pytest.raises(ConfigError, match="in use by a run"):
        WriterLock(tmp_path)
    held.release()

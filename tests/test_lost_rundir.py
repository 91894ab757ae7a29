"""A run directory that is removed, moved or replaced during a run, and what else can be wrong with the hold on it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp2.checkpoint.files import LocalFiles, NotTheWriter
from fsdp2.checkpoint.saver import SaveFailed
from fsdp2.checkpoint.store import Store, verify
from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.directory.hold import Hold
from fsdp2.run.directory.lock import LostRunDir, WriterLock
from fsdp2.run.directory.rundir import RunDir
from fsdp2.run.preflight import preflight
from fsdp2.run.process import ending
from fsdp2.run.process.group import RunStopped
from fsdp2.run.process.runtime import World
from fsdp2.train import main
from fsdp2_extra.baselines.swap_files import SwapFiles
from tests.harness import Ranks, of_kind, small

Events = list[tuple[str, dict[str, Any]]]
Train = Callable[..., Events]
ONE = World(0, 1, 0, 1)


def _lose(run: Path, how: str) -> None:
    """Take the run directory away, as a user would. What another run has made waits in `other`."""
    if how == "removed":
        shutil.rmtree(run)
        return
    os.rename(run, run.with_name("moved"))
    if how == "replaced":
        os.rename(run.with_name("other"), run)


def _orphan(line: list[str], run: Path, how: str, when: tuple[str, Any]) -> tuple[str, str, Events]:
    """A run whose directory is lost on rank 0 after an event, or in the sync of a file; how it ended."""
    events: Events = []
    real, left = LocalFiles.fsync, [dist.get_rank() == 0]

    def lose(*moment: Any) -> None:
        if left[0] and moment == when:
            left[0] = False
            _lose(run, how)

    def on_event(kind: str, data: dict[str, Any]) -> None:
        events.append((kind, data))
        lose(kind, data.get("step"))

    def fsync(self: LocalFiles, name: str) -> None:
        lose("fsync", f"{self.root.name}/{name}")
        real(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFiles, "fsync", fsync)
        try:
            main(parse(line), on_event)
        except (RunStopped, NotTheWriter, SaveFailed) as error:
            return type(error).__name__, str(error), events
    return "", "", events


def _tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name != ".lock"}


@pytest.mark.parametrize(
    ("how", "when", "flags"),
    [
        ("removed", ("train", 3), ""),
        ("moved", ("train", 3), "--on-checkpoint-failure=continue"),
        ("replaced", ("checkpoint", 2), "--async-checkpoint"),
        ("replaced", ("fsync", "step-00000004/__0_0.distcp"), ""),
        ("replaced", ("fsync", "step-00000004/.metadata.tmp"), "--async-checkpoint"),
        ("replaced", ("checkpoint", 4), "--memory-snapshot --tensorboard"),
        ("moved", ("eval", 6), "--no-save-model"),
    ],
)
def test_a_run_that_has_lost_its_directory_stops_and_leaves_others_alone(
    ranks: Ranks, train: Train, tmp_path: Path, how: str, when: tuple[str, Any], flags: str
) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    if how == "replaced":
        train("--checkpoint-every=2", "--seed=2", "--keep=9", run="other")
    others = _tree(tmp_path / "other")
    line = small(run, "--max-steps=6", "--checkpoint-every=2", "--keep=9", *flags.split())
    first, second = ranks.run(_orphan, line, run, how, when)
    # A recording that is not written at the end, either, replaces the error; both are one line and status 1.
    assert {first[0], second[0]} <= {"RunStopped", "LostRunDir"}
    assert first[1] == second[1] or "snapshot" in flags
    assert not of_kind(first[2], "end")
    last = {("train", 3): 2, ("checkpoint", 4): 4, ("eval", 6): 4}.get(when, 2)
    if how == "removed":
        assert first[1] == (
            f"--run-dir {run}: it was removed during this run; no checkpoint of it is left; start again in a folder "
            "that stays"
        )
        assert not run.exists()
        return
    assert first[1] == (
        f"--run-dir {run}: it was moved to {moved} during this run; its last checkpoint is "
        f"{moved}/checkpoints/step-{last:08d}; --run-dir {moved} goes on with it"
    )
    store = Store(LocalFiles(moved / "checkpoints"))
    assert store.committed()[-1] == last
    for step in store.committed():
        verify(store.checkpoint(step))
    assert _tree(run) == others
    if how == "replaced":
        for step in (2, 4, 6):
            verify(Store(LocalFiles(run / "checkpoints")).checkpoint(step))


def test_a_run_goes_on_where_its_directory_was_moved_to(ranks: Ranks, train: Train, tmp_path: Path) -> None:
    whole = train(run="whole")
    line = small(tmp_path / "run", "--max-steps=6", "--checkpoint-every=2")
    ranks.run(_orphan, line, tmp_path / "run", "moved", ("train", 3))
    rest = of_kind(train("--checkpoint-every=2", run="moved"), "train")
    assert [event["loss"] for event in rest] == [event["loss"] for event in of_kind(whole, "train")][2:]


@pytest.mark.parametrize("harm", ["its lock is removed", "its lock is another's", "it is a new folder"])
def test_a_lock_notices_what_flock_does_not(tmp_path: Path, harm: str) -> None:
    lock = WriterLock(tmp_path / "run")
    assert lock.lost() is None
    if harm == "its lock is another's":  # on a file system whose locks hold on one node alone
        (tmp_path / "run" / ".lock").write_text("f" * 32)
    elif harm == "its lock is removed":
        (tmp_path / "run" / ".lock").unlink()
    else:
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / ".lock").write_text(lock.token)
    how, now = lock.lost() or ("", None)
    assert how == (
        "was removed" if "new" in harm else "has lost its .lock: it was removed, or another run has written there"
    )
    assert now == (None if "new" in harm else tmp_path / "run")
    before = sorted((tmp_path / "run").iterdir())
    lock.release(refused=True)
    assert sorted((tmp_path / "run").iterdir()) == before, "what isn't ours was removed"


def test_swap_files_of_a_run_that_came_later_stay(tmp_path: Path) -> None:
    mine = SwapFiles(str(tmp_path / "swap"), 0)
    os.rename(tmp_path / "swap", tmp_path / "moved")
    theirs = tmp_path / "swap" / "zero_stage_3" / "float32params" / "rank0"
    theirs.mkdir(parents=True)
    mine.release()
    assert theirs.is_dir()


def test_the_token_is_durable_before_other_nodes_hear_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append(path.read_text() if path.is_file() else path.name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    lock = WriterLock(tmp_path / "run")
    assert synced[-2:] == [lock.token, "run"]
    lock.release()


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def flock(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError) as caught:
        preflight(parse(small(tmp_path / "run")), ONE)
    assert f"--run-dir {tmp_path / 'run'}: its file system can't lock files ({os.strerror(code)})" in str(caught.value)
    assert "Lustre: -o flock" in str(caught.value)


IN_THE_WAY = {
    "a FIFO": os.mkfifo,
    "a folder": os.mkdir,
    "a dangling link": lambda path: os.symlink("nowhere", path),
    "a file": lambda path: path.write_text("in the way"),
}


@pytest.mark.parametrize("what", IN_THE_WAY)
@pytest.mark.parametrize(
    "name",
    [".lock", "metrics.jsonl", "config.json", "checkpoints", "full_model", "tensorboard", "wandb", "tracking.json"],
)
def test_something_else_in_the_place_of_a_file_or_folder_is_refused(tmp_path: Path, name: str, what: str) -> None:
    is_folder = "." not in name
    if what == ("a folder" if is_folder else "a file") or (name, what) == (".lock", "a dangling link"):
        return  # that is what belongs there, or what a lock file can be
    (tmp_path / "run").mkdir()
    IN_THE_WAY[what](tmp_path / "run" / name)
    with pytest.raises(ConfigError) as caught:
        preflight(parse(small(tmp_path / "run")), ONE)
    assert str(caught.value).startswith(f"--run-dir {tmp_path / 'run'}: ")
    assert name in str(caught.value) or "Is a directory" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert os.path.lexists(tmp_path / "run" / name)


@pytest.mark.parametrize("error", [SaveFailed("step 3 was not saved"), LostRunDir("it was moved"), RunStopped("so")])
def test_an_end_by_intention_is_one_line_and_status_1(error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, ending.exit_status():
        raise error
    assert ended.value.code == 1
    assert capfd.readouterr().err == f"fsdp2: stopped: {error}\n"


def _started(run: Path) -> tuple[str, list[str]]:
    """The start of a run whose folder is lost on rank 0; what other ranks did meanwhile."""
    hold, done = Hold(RunDir(run)), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(hold, "require_folder", _lost)
        with pytest.raises(ConfigError) as caught, hold.starting():
            done.append("a collective of its own")
    return str(caught.value), done


def _lost() -> None:
    raise LostRunDir("--run-dir run: it was removed during this run")


def test_a_start_whose_folder_is_lost_on_one_rank_begins_on_none(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(_started, tmp_path / "run") == [("--run-dir run: it was removed during this run", [])] * 2


def test_a_lock_is_released_where_its_folder_can_not_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = WriterLock(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", _fails)
        with pytest.raises(OSError, match="busy"):
            lock.release(refused=True)
    assert lock.lost() is not None
    WriterLock(tmp_path / "run").release()


def _fails(*_: Any) -> None:
    raise OSError(errno.EBUSY, "busy")

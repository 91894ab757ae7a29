"""Disks that are full, read-only or limited: a clear error, and what was committed is as it was."""

from __future__ import annotations

import errno
import functools
import multiprocessing
import os
import pickle
import resource
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp2.checkpoint import disk, files, full_dtensor
from fsdp2.checkpoint.disk import DiskError, disk_errors
from fsdp2.checkpoint.files import EagerFile, LocalFiles
from fsdp2.checkpoint.full_model import save_full
from fsdp2.checkpoint.saver import SaveFailed
from fsdp2.checkpoint.state import AppState
from fsdp2.checkpoint.store import Store, verify
from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.directory import room
from fsdp2.run.preflight import check_url, preflight
from fsdp2.run.process.ending import exit_status
from fsdp2.run.process.runtime import World
from fsdp2.train import main
from tests.harness import Ranks, losses, make_engine, of_kind, save, small

Events = list[tuple[str, dict[str, Any]]]
Train = Callable[..., Events]


def _run(line: list[str], largest_file: int | None = None) -> tuple[str, Events]:
    """A run, on rank 1 with a limit on the size of a file; why it stopped."""
    events: Events = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest_file is not None and dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, before[1]))
    try:
        with pytest.MonkeyPatch.context() as patch:
            # A run looks for room before it starts; here somebody else takes it later.
            patch.setattr(room, "free_bytes", lambda place: None)
            main(parse(line), lambda kind, data: events.append((kind, data)))
    except SaveFailed as error:
        return str(error), events
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "", events


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for two checkpoints of the smallest model and not for three."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1600k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small file system ({mounted.stderr.strip()})")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("mode", ["", "--async-checkpoint"])
def test_a_full_disk_stops_the_run_and_it_goes_on_when_there_is_room(
    ranks: Ranks, small_disk: Path, tmp_path: Path, train: Train, mode: str
) -> None:
    line = small(small_disk / "run", "--max-steps=5", "--checkpoint-every=1", "--no-save-model", *mode.split())
    for message, _ in ranks.run(_run, line):
        assert "step 3 was not saved" in message
        assert f"[Errno 28] No space left on device: the file system is {small_disk}, " in message
        assert " kB were to be written, 0 B are free" in message
    store = Store(LocalFiles(small_disk / "run" / "checkpoints"))
    assert store.committed() == [1, 2]
    assert store.files.list("") == ["step-00000001", "step-00000002"], "the failed save still takes room"
    for step in (1, 2):
        verify(store.checkpoint(step))
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    message, events = ranks.run(_run, line)[0]
    assert message == ""
    assert of_kind(events, "resume")[0]["step"] == 2
    assert losses(events) == losses(train(run="whole", steps=5))[2:]


def test_a_full_disk_with_continue_trains_to_the_end_and_fails_there(
    ranks: Ranks, small_disk: Path, train: Train
) -> None:
    flags = ["--max-steps=4", "--checkpoint-every=1", "--on-checkpoint-failure=continue", "--no-save-model"]
    message, events = ranks.run(_run, small(small_disk / "run", *flags))[0]
    assert losses(events) == losses(train(run="whole", steps=4))
    assert "ended at step 4, and its last checkpoint is of an earlier step" in message
    assert Store(LocalFiles(small_disk / "run" / "checkpoints")).committed() == [1, 2]


def test_a_limit_on_one_rank_is_named(ranks: Ranks, tmp_path: Path) -> None:
    """As a quota: rank 1's shard is larger than it may write."""
    line = small(tmp_path / "run", "--max-steps=3", "--no-save-model")
    for message, _ in ranks.run(_run, line, 100_000):
        assert "step 3 was not saved" in message
        assert "rank 1: DiskError: [Errno 27] File too large: the file system is /" in message
    assert Store(LocalFiles(tmp_path / "run" / "checkpoints")).files.list("") == []


def _saves_with_limits(folder: Path, limits: list[int]) -> list[str]:
    """Saves, each with another limit on the size of a file on rank 1; what each failed with."""
    engine = make_engine()
    app, store = AppState(engine.model, engine.optimizer, {}), Store(LocalFiles(folder))
    before, messages = resource.getrlimit(resource.RLIMIT_FSIZE), []
    for step, limit in enumerate(limits, 1):
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            save(store, app, step)
        except SaveFailed as error:
            messages.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return messages


def test_wherever_a_write_fails_the_disk_is_named_and_not_what_torch_made_of_it(ranks: Ranks, tmp_path: Path) -> None:
    limits = [0, 100, 704, 5_000, 20_000, 60_000, 100_000]
    for messages in ranks.run(_saves_with_limits, tmp_path, limits):
        assert len(messages) == len(limits)
        for message in messages:
            assert "rank 1: DiskError: [Errno 27] File too large: the file system is /" in message
            assert " kB were to be written" in message
            assert "unexpected pos" not in message


def _fails_at_the_full_model(folder: Path) -> str:
    engine = make_engine()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        save_full(full_dtensor, AppState(engine.model, engine.optimizer, {}), folder / "full-model.pt", 1)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return ""


def test_a_full_model_that_does_not_fit_is_named(ranks: Ranks, tmp_path: Path) -> None:
    (message,) = ranks.run(_fails_at_the_full_model, tmp_path, ranks=1)
    assert message.startswith("DiskError: [Errno 27] File too large: the file system is /")
    assert " kB were to be written" in message


def _fill(disk: Path) -> None:
    with suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass


def _full_at_the_start(line: list[str], disk: Path, *, new: bool) -> str:
    """A run on a disk that is full already, with a run directory of its own or of an earlier run; its refusal."""
    if not new:
        main(parse([*line, "--max-steps=1"]))
    if dist.get_rank() == 0:
        _fill(disk)
    dist.barrier()
    if new and dist.get_rank() != 0:
        return ""  # rank 0's refusal before any group is the launcher's to spread
    try:
        preflight(parse(line), World(0, 2, 0, 2)) if new else main(parse([*line, "--max-steps=2"]))
    except ConfigError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("new", [True, False])
def test_a_disk_that_is_full_at_the_start_is_one_line_on_every_rank(ranks: Ranks, small_disk: Path, new: bool) -> None:
    run = functools.partial(_full_at_the_start, new=new)
    first, second = ranks.run(run, small(small_disk / "run", "--no-save-model"), small_disk)
    assert second == ("" if new else first)
    assert first.startswith(f"--run-dir {small_disk / 'run'}: ")
    assert f"No space left on device: the file system is {small_disk}, 0 B are free" in first
    assert "choose a" in first
    assert "\n" not in first


def _full_in_the_middle(line: list[str], disk: Path) -> tuple[str, list[str], Events]:
    events: Events = []

    def on_event(kind: str, data: dict[str, Any]) -> None:
        events.append((kind, data))
        if (kind, data.get("step")) == ("train", 2):
            _fill(disk)

    try:
        main(parse(line), on_event)
    except Exception as error:
        return f"{type(error).__name__}: {error}", getattr(error, "__notes__", []), events
    return "", [], events


def test_a_disk_that_is_full_in_the_middle_is_named(ranks: Ranks, small_disk: Path) -> None:
    line = small(small_disk / "run", "--max-steps=40", "--no-save-model", "--checkpoint-every=100")
    ((message, notes, events),) = ranks.run(_full_in_the_middle, line, small_disk, ranks=1)
    assert message == (f"DiskError: [Errno 28] No space left on device: the file system is {small_disk}, 0 B are free")
    assert notes == ["the failure could not be reported: " + message.removeprefix("DiskError: ")]
    assert not of_kind(events, "end")


def test_a_disks_error_is_one_line_and_status_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def raw() -> None:
        with exit_status():
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "file"))

    process = multiprocessing.get_context("fork").Process(target=raw)
    process.start()
    process.join(20)
    assert process.exitcode == 1
    said = capfd.readouterr().err
    assert said.startswith("fsdp2: stopped: rank 0: [Errno 30] Read-only file system: the file system is /")
    assert said.count("\n") == 1


@pytest.mark.parametrize("hidden", ["raised from it", "raised in its handling", "raised from None", "both"])
def test_the_disks_error_is_found_behind_others(tmp_path: Path, hidden: str) -> None:
    disk = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    error = RuntimeError("unexpected pos 704 vs 598")
    error.__cause__ = disk if hidden == "raised from it" else ValueError() if hidden == "both" else None
    error.__context__ = disk if hidden != "raised from it" else error  # which is a circle
    with pytest.raises(DiskError) as caught, disk_errors(tmp_path / "not" / "there", 3_000):
        raise error
    assert caught.value.errno == errno.EDQUOT
    assert "3.0 kB were to be written" in str(caught.value)
    assert "this user's quota is used up" in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))  # DCP sends it to the other ranks
    assert (type(again), str(again)) == (DiskError, str(caught.value))


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOENT, "gone"), KeyError("no"), OSError("of no number"), PermissionError(errno.EPERM, "a socket")],
)
def test_other_errors_stay_as_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, disk_errors(tmp_path):
        raise error
    assert caught.value is error


def test_a_read_only_disk_is_named(ranks: Ranks, small_disk: Path) -> None:
    line = small(small_disk / "run", "--max-steps=1", "--no-save-model")
    assert ranks.run(_run, line)[0][0] == ""
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for message in ranks.run(_refused, line):
        assert "Read-only file system" in message
        assert "choose a folder that can" in message
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    verify(Store(LocalFiles(small_disk / "run" / "checkpoints")).checkpoint(1))


def _refused(line: list[str]) -> str:
    try:
        preflight(parse(line), World(0, 2, 0, 2))
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_a_large_file_is_on_its_way_to_the_disk_before_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = threading.Semaphore(0)
    sizes: list[int] = []

    def sync(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        synced.release()

    monkeypatch.setattr(EagerFile, "BYTES", 1 << 16)
    monkeypatch.setattr(files, "sync_data", sync)
    content = os.urandom(3 << 16)
    with LocalFiles(tmp_path).create("large") as file:
        for start in range(0, len(content), 1 << 16):
            file.write(content[start : start + (1 << 16)])
            assert synced.acquire(timeout=10)
            file._syncing.result()  # type: ignore[attr-defined]
    assert (tmp_path / "large").read_bytes() == content
    assert sizes == [1 << 16, 2 << 16, 3 << 16]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sync")]


def test_a_disk_that_fails_in_the_middle_of_a_file_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(EagerFile, "BYTES", 1 << 16)
    monkeypatch.setattr(files, "sync_data", fail)
    file = LocalFiles(tmp_path).create("large")
    file.write(bytes(1 << 16))
    with pytest.raises(OSError, match="Input/output error"):
        file.close()
    assert file.closed


def test_uploads_are_not_collected_in_memory_unless_tmpdir_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"/tmp": "tmpfs", "/var/tmp": "ext4"}
    monkeypatch.setattr(disk, "file_system", lambda folder: kinds[str(folder)])
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.delenv("TMPDIR", raising=False)
    assert disk.temporary_folder() == "/var/tmp"
    kinds["/tmp"] = "overlay"
    assert disk.temporary_folder() == "/tmp"
    kinds.update({"/tmp": "tmpfs", "/var/tmp": "tmpfs"})
    with pytest.raises(OSError, match="set TMPDIR to a folder"):
        disk.temporary_folder()
    with pytest.raises(ConfigError, match=r"--run-dir memory://run: .* set TMPDIR to a folder"):
        check_url("memory://run", World(0, 1, 0, 1))
    monkeypatch.setenv("TMPDIR", "/tmp")
    assert disk.temporary_folder() == "/tmp"


def test_the_kind_of_a_file_system_is_known(tmp_path: Path) -> None:
    assert disk.file_system(Path("/proc")) == "proc"
    assert disk.file_system(tmp_path) not in ("", "proc")

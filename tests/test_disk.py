"""Disks that are full, read-only or limited: a clear error, and what was committed is as it was."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp2.checkpoint import files
from fsdp2.checkpoint.files import EagerFile, LocalFiles
from fsdp2.checkpoint.save import SaveFailed
from fsdp2.checkpoint.store import Store, verify
from fsdp2.config import parse
from fsdp2.train import main
from tests.harness import Ranks, losses, of_kind, small

Events = list[tuple[str, dict[str, Any]]]
Train = Callable[..., Events]


def _run(line: list[str], largest_file: int | None = None) -> tuple[str, Events]:
    """A run, on rank 1 with a limit on the size of a file; why it stopped."""
    events: Events = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest_file is not None and dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, before[1]))
    try:
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
        assert "No space left on device" in message
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
        assert "rank 1: OSError: [Errno 27] File too large" in message
    assert Store(LocalFiles(tmp_path / "run" / "checkpoints")).files.list("") == []


def test_a_place_that_takes_no_checkpoints_is_named(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file in the way")
    for message, _ in ranks.run(_run, small(tmp_path / "run", "--max-steps=2", "--no-save-model")):
        assert "step 2 was not saved" in message
        assert "rank 0: FileExistsError" in message or "rank 0: NotADirectoryError" in message


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
    from fsdp2.options import ConfigError
    from fsdp2.preflight import preflight
    from fsdp2.runtime import World

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

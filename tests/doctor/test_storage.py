"""A place that isn't shared, is full, forbidden or slow is a row that names the ranks; nothing is left behind."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.config import Config
from fsdp2.run.process.runtime import World
from fsdp2_tools.doctor import storage
from fsdp2_tools.doctor.asking import Asker, Here, Question
from fsdp2_tools.doctor.judging import BAD, OK, WORSE, Hosts, Row
from tests.doctor.threads import examined

HOSTS = Hosts({rank: ("ab"[rank // 2], f"10.0.0.{rank // 2}") for rank in range(4)})
SIZE = 1 << 20


def findings(place: str, needed: int | None = None, **questions: Any) -> list[Row]:
    def ask(asker: Asker) -> list[Row]:
        found = storage.ask_storage(asker, place, SIZE)
        return [*storage.rows(found, HOSTS, place, needed), *asker.rows(HOSTS)]

    known: dict[str, Question] = {
        "leave_nonce": storage.leave_nonce,
        "storage": storage.measure,
        "clean": storage.clean,
    }
    rows: list[Row] = examined(4, known | questions, ask, seconds=8.0)
    return [row for row in rows if row.verdict != OK]


def test_a_good_place_has_no_finding_and_nothing_is_left(tmp_path: Path) -> None:
    assert findings(str(tmp_path / "runs"), needed=SIZE) == []
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_place_that_two_hosts_have_each_for_itself_names_one(tmp_path: Path) -> None:
    def elsewhere(function: Any) -> Any:
        def asked(here: Here, place: str, **arguments: Any) -> Any:
            return function(here, place=str(tmp_path / HOSTS.of[here.world.rank]), **arguments)

        return asked

    (row,) = findings(str(tmp_path), storage=elsewhere(storage.measure), leave_nonce=elsewhere(storage.leave_nonce),
                      clean=elsewhere(storage.clean))  # fmt: skip
    assert (row.name, row.verdict, row.who) == ("run directory", BAD, "host b")
    assert [list((tmp_path / host).iterdir()) for host in "ab"] == [[], []]


def test_a_place_that_cannot_be_a_folder_is_bad(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    row, *_ = findings(str(tmp_path / "file" / "runs"))
    assert (row.name, row.verdict) == ("rights and room", BAD)
    assert row.measured.startswith("mkdir: ")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for two ranks' files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2560k", "none", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting needs root: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_bad(full_disk: Path) -> None:
    def kept(here: Here, **arguments: Any) -> Any:
        """What one rank has written stays until all have."""
        if here.world.rank < 3:
            with suppress(OSError):  # it may be full already
                (Path(arguments["place"]) / f"other-{here.world.rank}").write_bytes(bytes(800 << 10))
        return storage.measure(here, **arguments)

    row, *_ = findings(str(full_disk), storage=kept)
    assert (row.name, row.verdict) == ("rights and room", BAD)
    assert "No space left" in row.measured


def test_free_space_is_compared_with_the_checkpoints(tmp_path: Path) -> None:
    (row,) = findings(str(tmp_path), needed=10**18)
    assert (row.name, row.verdict) == ("free space", BAD)


def test_a_resume_needs_room_beside_the_checkpoints_that_are_there(tmp_path: Path) -> None:
    config = Config()
    here = Here(World(0, 1, 0, 1), torch.device("cpu"), None, 5.0, config=config)
    fresh = storage.room(here, str(tmp_path))
    assert fresh is not None
    for step in range(1, config.keep + 1):
        folder = tmp_path / "checkpoints" / f"step-{step:08}"
        folder.mkdir(parents=True)
        (folder / "shard").write_bytes(bytes(1000))
    assert storage.room(here, str(tmp_path)) == fresh - 1000 * config.keep


@pytest.mark.alone
def test_a_rank_with_a_slow_disk_is_named(tmp_path: Path) -> None:
    def slow(here: Here, **arguments: Any) -> Any:
        found = storage.measure(here, **arguments)
        return found | ({"fsync": found["fsync"] + 1.5} if here.world.rank == 3 else {})

    (row,) = findings(str(tmp_path), storage=slow)
    assert (row.name, row.verdict, row.who) == ("storage fsync", WORSE, "rank 3 (b)")


def test_a_url_is_written_read_and_cleaned() -> None:
    place = f"memory://doctor-{time.time_ns()}"
    assert findings(place) == []
    files = storage.open_files(place)
    assert [files.list(name) for name in files.list("")] in ([], [[]])


def test_a_url_without_rights_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.implementations.memory

    def denied(*arguments: Any, **settings: Any) -> Any:
        raise PermissionError("you may not delete")

    for name in ("rm", "rm_file", "_rm", "delete"):
        if hasattr(fsspec.implementations.memory.MemoryFileSystem, name):
            monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, name, denied)
    row, *_ = findings(f"memory://doctor-{time.time_ns()}")
    assert (row.name, row.verdict) == ("rights and room", BAD)
    assert row.measured.startswith("delete: ")

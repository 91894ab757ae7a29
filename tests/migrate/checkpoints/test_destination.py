"""Where a conversion may write, and a full disk."""

from __future__ import annotations

import gc
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from tests.migrate.checkpoints.conftest import Cli, Saved, everything

State = dict[str, Tensor]


def test_where_it_would_be_written(orig: Saved, cli: Cli, tmp_path: Path) -> None:
    source = Path(shutil.copytree(orig.folder / "sharded", tmp_path / "source"))
    before = everything(tmp_path)
    assert "exists; nothing is overwritten" in cli(source, source)[1]
    assert "is inside of the source" in cli(source, source / "out")[1]
    assert "is a URL" in cli(source, "s3://bucket/out")[1]
    assert "name it step-00000003, or not like a step" in cli(source, tmp_path / "step-00000004")[1]
    assert everything(tmp_path) == before
    status, _ = cli(source, tmp_path / "run" / "checkpoints" / "step-00000003")
    assert status == 0
    already = cli(tmp_path / "run", tmp_path / "again")
    assert (already[0], "is a checkpoint of fsdp2.train already" in already[1]) == (2, True)
    already = cli(tmp_path / "run" / "checkpoints" / "step-00000003", tmp_path / "again")
    assert (already[0], "is a checkpoint of fsdp2.train already" in already[1]) == (2, True)


@pytest.mark.parametrize("source", ["full.pt", "sharded"])
def test_no_space_is_one_line_and_leaves_nothing(orig: Saved, cli: Cli, tmp_path: Path, source: str) -> None:
    before = everything(orig.folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        status, line = cli(orig.folder / source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 2
    assert "out was not written: [Errno 27] File too large" in line
    assert list(tmp_path.iterdir()) == []
    assert everything(orig.folder) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small file system ({mounted.stderr.strip()})")
    yield folder
    gc.collect()  # what a caught error's frames have mapped there
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_one_line_and_leaves_nothing(orig: Saved, cli: Cli, small_disk: Path) -> None:
    for arguments in ([orig.folder / "full.pt", small_disk / "out"], [orig.folder / "sharded", small_disk / "out"]):
        status, line = cli(*arguments)
        assert (status, "No space left on device" in line) == (2, True)
        assert list(small_disk.iterdir()) == []

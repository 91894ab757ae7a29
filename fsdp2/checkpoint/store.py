"""A run's checkpoints on disk: one directory a step, which exists once its COMMIT.json does.

    checkpoints/step-00000120/  __0_0.distcp …  .metadata  COMMIT.json

Shards are written into a new directory; then COMMIT.json, which lists them with size and hash, is written
under another name, synced and renamed. A directory without it is a save that died: it is removed and
passed over. One whose files don't match it is damaged: that is an error, never passed over in silence.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fsdp2.checkpoint.files import LocalFiles

MARKER = "COMMIT.json"
_STEP = re.compile(r"step-(\d{8,})")


class DamagedCheckpoint(RuntimeError):
    """A committed checkpoint whose files are missing or don't match its marker."""


def fingerprint(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def read_marker(directory: Path) -> dict[str, Any]:
    """COMMIT.json of a checkpoint. Raises DamagedCheckpoint if it can't be read."""
    try:
        marker: dict[str, Any] = json.loads((directory / MARKER).read_text())
        if not (isinstance(marker["files"], dict) and isinstance(marker["step"], int)):
            raise ValueError("no files or no step")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{directory}: {MARKER} can't be read ({error!r})") from error
    return marker


def verify(directory: Path, names: Iterable[str] | None = None, *, hashes: bool = True) -> None:
    """Compare the files of a committed checkpoint with its marker.

    Args:
        names: check only these; ranks divide the work so.
        hashes: False compares the sizes alone.

    Raises DamagedCheckpoint that lists what is missing or differs.
    """
    files: Mapping[str, Mapping[str, Any]] = read_marker(directory)["files"]
    wrong = []
    for name in files if names is None else names:
        path, expected = directory / name, files[name]
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != expected["size"]:
            wrong.append(f"{name} has {path.stat().st_size} bytes and not {expected['size']}")
        elif hashes and fingerprint(path)["sha256"] != expected["sha256"]:
            wrong.append(f"{name} has another content than was committed")
    if wrong:
        raise DamagedCheckpoint(f"{directory}: {'; '.join(wrong)}")


class Store:
    """The checkpoints under one directory. It is used by one process, rank 0's, but for `verify`."""

    def __init__(self, root: Path, files: LocalFiles | None = None) -> None:
        self.root, self.files = root, files or LocalFiles()

    def directory(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def _steps(self) -> dict[int, Path]:
        matches = ((_STEP.fullmatch(path.name), path) for path in self.files.list(self.root))
        return {int(match[1]): path for match, path in matches if match}

    def committed(self) -> list[int]:
        """Steps with a marker, oldest first."""
        return sorted(step for step, path in self._steps().items() if (path / MARKER).exists())

    def remove_dead(self) -> list[Path]:
        """Remove saves that died before their commit; what was removed."""
        dead = [path for path in self._steps().values() if not (path / MARKER).exists()]
        for path in dead:
            self._remove(path)
        return dead

    def begin(self, step: int) -> Path:
        """A new, empty directory for the shards of a step. Raises FileExistsError if it is committed."""
        path = self.directory(step)
        if (path / MARKER).exists():
            raise FileExistsError(f"{path} is committed already; a checkpoint is never overwritten")
        self._remove(path)
        self.files.mkdir(path)
        return path

    def commit(self, step: int, files: Mapping[str, Mapping[str, Any]], info: Mapping[str, Any]) -> Path:
        """Make a checkpoint exist, after every rank's shards are durable.

        Args:
            files: name -> `fingerprint` of every file in the directory.
            info: what else the marker says: world size, mesh, config, versions, names and shapes.
        """
        path = self.directory(step)
        content = json.dumps({"step": step, **info, "files": dict(sorted(files.items()))}, indent=1)
        aside = path / (MARKER + ".tmp")
        self.files.write(aside, content.encode())
        self.files.fsync(aside)
        # The entries of the shards must be durable before the marker that vouches for them.
        self.files.fsync(path)
        self.files.rename(aside, path / MARKER)
        self.files.fsync(path)
        self.files.fsync(self.root)
        return path

    def retain(self, keep: int) -> list[int]:
        """Remove all but the newest `keep` committed checkpoints; the steps removed."""
        old = self.committed()[:-keep]
        for step in old:
            self._remove(self.directory(step))
        return old

    def set_aside(self, after: int) -> list[Path]:
        """Rename checkpoints newer than step `after`, which a run that goes back to it will write again.

        Nothing is deleted: the new names, which `committed` doesn't see, are returned.
        """
        moved = []
        for step in [step for step in self.committed() if step > after]:
            number = 1
            while (target := self.root / f"superseded-{number}-step-{step:08d}").exists():
                number += 1
            self.files.rename(self.directory(step), target)
            moved.append(target)
        return moved

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint's directory, marker first: half-removed, it is a dead save and not damage."""
        if not path.exists():
            return
        if (path / MARKER).exists():
            self.files.unlink(path / MARKER)
            self.files.fsync(path)
        for file in self.files.list(path):
            self.files.unlink(file)
        self.files.rmdir(path)

"""The file operations of the store, in one small object that a test can replace."""

from __future__ import annotations

import os
from pathlib import Path


class LocalFiles:
    """Files of a local file system."""

    def write(self, path: Path, content: bytes) -> None:
        with open(path, "wb") as file:
            file.write(content)

    def fsync(self, path: Path) -> None:
        """Make a file's content, or a directory's entries, survive a power cut."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def mkdir(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def list(self, path: Path) -> list[Path]:
        """The entries of a directory, sorted; none if it doesn't exist."""
        return sorted(path.iterdir()) if path.is_dir() else []

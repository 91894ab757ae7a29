"""`Files` on an object store, by fsspec: s3://, gs:// and whatever else it knows.

A put is atomic and durable there, so nothing is synced or renamed into place. What can go wrong is the
network: every operation is tried again, with growing pauses, and ends with an error that says how often.
"""

from __future__ import annotations

import io
import os
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar, cast

import fsspec

from fsdp2.checkpoint.files import inside

T = TypeVar("T")

# A connection that says nothing for so long is given up and tried again.
TIMEOUT_SECONDS = float(os.environ.get("FSDP2_REMOTE_TIMEOUT", 60))
ATTEMPTS = int(os.environ.get("FSDP2_REMOTE_ATTEMPTS", 6))
FIRST_PAUSE_SECONDS = 0.5
READ_AHEAD = 8 << 20

# What no second attempt changes, by the names that the clients give it.
FINAL = {"NoCredentialsError", "PartialCredentialsError", "NoSuchBucket", "ProfileNotFound"}

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


class RemoteError(OSError):
    """An operation on the store that failed again and again."""


class RemoteFiles:
    """Files below a URL. Raises ValueError for an unknown scheme, ImportError naming the extra to install."""

    put_is_atomic = True

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        scheme = self.url.split("://")[0]
        if scheme not in fsspec.available_protocols():
            raise ValueError(f"{scheme}:// is no kind of place that fsspec knows; use a folder, s3:// or gs://")
        if scheme in ("file", "local"):
            raise ValueError("is a local folder; give it as a path, which is locked and synced as one")
        try:
            self._fs = fsspec.filesystem(scheme, **_options(scheme))
        except ImportError as error:
            extra = EXTRAS.get(scheme)
            fix = f"pip install 'fsdp2-reference[{extra}]'" if extra else str(error)
            raise ImportError(f"{scheme}:// needs a package that isn't installed; {fix}") from None
        self._root = self._fs._strip_protocol(self.url)

    def __str__(self) -> str:
        return self.url

    def _path(self, name: str) -> str:
        return f"{self._root}/{inside(name)}" if name else self._root

    def at(self, name: str) -> RemoteFiles:
        return type(self)(f"{self.url}/{inside(name)}")

    def _again(self, what: str, operation: Callable[[], T]) -> T:
        """Run an operation until it works or has failed too often. An answer of the store is not tried again."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return operation()
            except (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError):
                raise
            except Exception as error:  # each store and its client raise errors of their own
                if attempt == ATTEMPTS or type(error).__name__ in FINAL:
                    times = "once" if attempt == 1 else f"{attempt} times"
                    raise RemoteError(
                        f"{what} {self.url} failed {times}, last with {type(error).__name__}: {error}"
                    ) from error
                # Spread, so that ranks that failed together don't come back together.
                time.sleep(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
        raise AssertionError("unreachable")

    def create(self, name: str) -> BinaryIO:
        return cast(BinaryIO, _Upload(self, name))

    def open(self, name: str) -> BinaryIO:
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(f"{self.url}/{name}")
        return cast(BinaryIO, io.BufferedReader(_Ranges(self, name, size), READ_AHEAD))

    def put(self, local: str, name: str) -> None:
        """Upload a local file; it is there whole or not at all."""
        size = os.path.getsize(local)

        def upload() -> None:
            self._fs.put_file(local, self._path(name))
            self._fs.invalidate_cache()
            found = self._fs.size(self._path(name))
            if found != size:
                raise OSError(f"{name} has {found} bytes there and not {size}")

        self._again(f"writing {name} to", upload)

    def write(self, name: str, content: bytes) -> None:
        self._again(f"writing {name} to", lambda: self._fs.pipe_file(self._path(name), content))

    def read(self, name: str) -> bytes:
        return cast(bytes, self._again(f"reading {name} of", lambda: self._fs.cat_file(self._path(name))))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes from `start` up to `end`."""

        def read() -> bytes:
            content: bytes = self._fs.cat_file(self._path(name), start=start, end=end)
            if len(content) != end - start:
                raise OSError(f"{name} gave {len(content)} bytes and not {end - start}")
            return content

        return self._again(f"reading {name} of", read)

    def size(self, name: str) -> int | None:
        def find() -> int | None:
            self._fs.invalidate_cache()  # another process may have written since
            try:
                info = self._fs.info(self._path(name))
            except FileNotFoundError:
                return None
            return int(info["size"]) if info["type"] == "file" else None

        return self._again(f"looking for {name} in", find)

    def fsync(self, name: str) -> None:
        """A put is durable when it returns."""

    def rename(self, source: str, target: str) -> None:
        """Copy what is below `source` and remove it there: not in one step, as there is none."""
        for file in self.list(source):
            copy = (self._path(f"{source}/{file}"), self._path(f"{target}/{file}"))
            self._again(f"copying {file} in", lambda copy=copy: self._fs.cp_file(*copy))  # type: ignore[misc]
        for file in self.list(source):
            self.unlink(f"{source}/{file}")

    def unlink(self, name: str) -> None:
        def remove() -> None:
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:  # by an attempt whose answer was lost
                return

        self._again(f"removing {name} from", remove)

    def mkdir(self, name: str) -> None:
        """There are no folders."""

    def rmdir(self, name: str) -> None:
        """There are no folders."""

    def list(self, name: str) -> list[str]:
        def find() -> list[str]:
            self._fs.invalidate_cache()
            try:
                found: list[str] = self._fs.ls(self._path(name), detail=False)
            except FileNotFoundError:
                return []
            return sorted({path.rstrip("/").rsplit("/", 1)[-1] for path in found})

        return self._again(f"listing {name or 'all'} of", find)


def _options(scheme: str) -> dict[str, Any]:
    """What makes a client give up on a silent connection instead of waiting for ever."""
    if EXTRAS.get(scheme) == "s3":
        config = {"connect_timeout": TIMEOUT_SECONDS, "read_timeout": TIMEOUT_SECONDS, "retries": {"max_attempts": 1}}
        return {"config_kwargs": config, "use_listings_cache": False, "default_cache_type": "none"}
    return {}


class _Upload(io.RawIOBase):
    """Collects a new file in a local temporary one and uploads it when closed: a failed upload needs the bytes
    again, and the state that they were made from may have changed by then."""

    def __init__(self, files: RemoteFiles, name: str) -> None:
        self._files, self._name = files, name
        self._spool = tempfile.NamedTemporaryFile(prefix="fsdp2-upload-")  # noqa: SIM115 - closed by close

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._spool.write(data)

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._spool.flush()
            self._files.put(self._spool.name, self._name)
        finally:
            self._spool.close()
            super().close()


class _Ranges(io.RawIOBase):
    """Reads a remote file by ranges, each tried again by itself."""

    def __init__(self, files: RemoteFiles, name: str, size: int) -> None:
        self._files, self._name, self._size, self._at = files, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        content = self._files.read_range(self._name, self._at, end)
        buffer[: len(content)] = content
        self._at = end
        return len(content)

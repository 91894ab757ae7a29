"""`Files` on an object store, by fsspec: s3://, gs:// and whatever else it knows.

A put is atomic and durable there, so nothing is synced or renamed into place. What can go wrong is the
network: every operation is tried again, with growing pauses, and ends with an error that says how often.

    FSDP2_REMOTE_TIMEOUT   seconds after which a silent connection, or an operation, is given up; 60.
                           A transfer has that once more for each 64 MiB.
    FSDP2_REMOTE_ATTEMPTS  how often each operation is tried; 6
"""

from __future__ import annotations

import copy
import io
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, TypeVar, cast

import fsspec

from fsdp2.checkpoint.disk import explained, temporary_folder
from fsdp2.checkpoint.files import NotTheWriter, Unreachable, inside
from fsdp2.checkpoint.store import MARKER
from fsdp2.units import install

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.5
BYTES_PER_TIMEOUT = 64 << 20
READ_AHEAD = 8 << 20

# What no second attempt changes, by the names that the clients give it.
FINAL = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError"}

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}

# Of its own: pauses must not draw from the generator that a run saves and restores.
_jitter = random.Random()


class RemoteFiles:
    """Files below a URL.

    Raises ValueError for an unknown scheme or a URL without a bucket, ImportError naming the extra to install.
    Operations raise FileNotFoundError or PermissionError if that is the store's answer, Unreachable if they
    failed each time.
    """

    put_is_atomic = True

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        scheme, _, rest = url.partition("://")
        if scheme not in fsspec.available_protocols():
            raise ValueError(f"{scheme}:// is not a protocol that fsspec knows; use a folder, s3:// or gs://")
        if scheme in ("file", "local"):
            raise ValueError("is a local folder; give it as a path, which is locked and synced as one")
        if not rest.strip("/"):
            raise ValueError(f"names no bucket; give {scheme}://bucket/run")
        self._timeout = positive_number("FSDP2_REMOTE_TIMEOUT", 60)
        self._attempts = max(1, int(positive_number("FSDP2_REMOTE_ATTEMPTS", 6)))
        try:
            self._fs = fsspec.filesystem(scheme, **_options(scheme, self._timeout))
        except ImportError as error:
            extra = EXTRAS.get(scheme)
            fix = install(extra) if extra else str(error)
            raise ImportError(f"{scheme}:// needs a package that isn't installed; {fix}") from None
        if EXTRAS.get(scheme) == "s3":
            self._fs.retries = 1  # else each of our attempts would be five of s3fs'
        self._root = self._fs._strip_protocol(self.url)
        # Called before each attempt to change something. NotTheWriter forbids it, an OSError is a failed attempt.
        # One list for all that `at` gives, whenever it was made.
        self.guards: list[Callable[[], None]] = []

    def __str__(self) -> str:
        return self.url

    def _path(self, name: str) -> str:
        return f"{self._root}/{inside(name)}" if name else cast(str, self._root)

    @property
    def fsspec(self) -> tuple[Any, str]:
        """The client, and the path in it: for other programs, which this object's retries and guards don't cover."""
        return self._fs, self._root

    def at(self, name: str) -> RemoteFiles:
        other = copy.copy(self)
        other.url, other._root = f"{self.url}/{inside(name)}", self._path(name)
        return other

    def hasty(self, seconds: float) -> RemoteFiles:
        """The same files without guards, where an operation is tried once and given up after `seconds`."""
        other = copy.copy(self)
        other._timeout, other._attempts, other.guards = seconds, 1, []
        return other

    def _call(self, method: str, *arguments: Any, size: int = 0, **options: Any) -> Any:
        """Call the client, for a limited time, in which it may transfer `size` bytes."""
        self._fs.invalidate_cache()  # another process may have written since
        seconds = self._timeout * (1 + size / BYTES_PER_TIMEOUT)
        if self._fs.async_impl:
            # The client's own timeout is for silence alone: it waits for ever on a server that stops reading.
            options["timeout"] = seconds
        try:
            return getattr(self._fs, method)(*arguments, **options)
        except fsspec.exceptions.FSTimeoutError:
            raise TimeoutError(f"not finished after {seconds:.0f} s (FSDP2_REMOTE_TIMEOUT sets that limit)") from None

    def again(self, what: str, operation: Callable[[], T], *, changes: bool = False) -> T:
        """Run an operation until it works or has failed too often. An answer of the store is not tried again."""
        for attempt in range(1, self._attempts + 1):
            try:
                for guard in self.guards if changes else ():
                    guard()
                return operation()
            except (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotTheWriter):
                raise
            except Exception as error:  # each store and its client raise errors of their own
                if attempt == self._attempts or type(error).__name__ in FINAL:
                    times = "once" if attempt == 1 else f"{attempt} times"
                    reason = " ".join(str(error).split())
                    raise Unreachable(
                        f"{what} {self.url} failed {times}, last with {type(error).__name__}: {reason}"
                    ) from error
                # Spread, so that ranks that failed together don't come back together.
                time.sleep(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * _jitter.uniform(0.5, 1.5))
        raise AssertionError("unreachable")

    def create(self, name: str) -> BinaryIO:
        """Replaces a file of that name: there is no way to create one that every store knows."""
        spool = tempfile.NamedTemporaryFile(prefix="fsdp2-upload-", dir=temporary_folder())  # noqa: SIM115 - closed by _Upload
        return cast(BinaryIO, _Upload(self, inside(name), spool))

    def open(self, name: str) -> BinaryIO:
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(f"{self.url}/{name}")
        return cast(BinaryIO, io.BufferedReader(_Ranges(self, name, size), READ_AHEAD))

    def put(self, local: str, name: str) -> None:
        """Upload a local file; it is there whole or not at all."""
        size, path = os.path.getsize(local), self._path(name)

        def upload() -> None:
            self._call("put_file", local, path, size=size)
            found = self._call("size", path)
            if found != size:
                raise OSError(f"{name} has {found} bytes there and not {size}")

        self.again(f"writing {name} to", upload, changes=True)

    def write(self, name: str, content: bytes) -> None:
        path = self._path(name)
        self.again(
            f"writing {name} to", lambda: self._call("pipe_file", path, content, size=len(content)), changes=True
        )

    def read(self, name: str) -> bytes:
        path = self._path(name)
        return cast(bytes, self.again(f"reading {name} of", lambda: self._call("cat_file", path)))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes from `start` up to `end`."""
        path = self._path(name)

        def read() -> bytes:
            content: bytes = self._call("cat_file", path, start=start, end=end, size=end - start)
            if len(content) != end - start:
                raise OSError(f"{name} gave {len(content)} bytes and not {end - start}")
            return content

        return self.again(f"reading {name} of", read)

    def size(self, name: str) -> int | None:
        path = self._path(name)

        def find() -> int | None:
            try:
                info = self._call("info", path)
            except FileNotFoundError:
                return None
            return int(info["size"]) if info["type"] == "file" else None

        return self.again(f"looking for {name} in", find)

    def fsync(self, name: str) -> None:
        """A put is durable when it returns."""

    def rename(self, source: str, target: str) -> None:
        """Copy a file, or what is below a folder, and then remove the source: not in one step, as there is none.

        At no moment is a marker beside files that are missing: it is copied last and removed first.
        """
        names = [""] if self.size(source) is not None else [f"/{name}" for name in self.list(source)]
        if not names:
            raise FileNotFoundError(f"{self.url}/{source}")
        names.sort(key=lambda name: name == f"/{MARKER}")
        for name in names:
            self._copy(source + name, target + name)
        for name in reversed(names):
            self.unlink(source + name)

    def _copy(self, source: str, target: str) -> None:
        paths = self._path(source), self._path(target)
        size = self.size(source) or 0
        self.again(f"copying {source} in", lambda: self._call("cp_file", *paths, size=size), changes=True)

    def unlink(self, name: str) -> None:
        path = self._path(name)

        def remove() -> None:
            try:
                self._call("rm_file", path)
            except FileNotFoundError:  # by an attempt whose answer was lost
                return

        self.again(f"removing {name} from", remove, changes=True)

    def mkdir(self, name: str) -> None:
        """There are no folders. But who begins to write below one learns here if the lease is lost."""
        self.again(f"beginning {name or 'to write'} in", lambda: None, changes=True)

    def rmdir(self, name: str) -> None:
        """There are no folders."""

    def list(self, name: str) -> list[str]:
        return sorted(self._kinds(name))

    def folders(self, name: str) -> Sequence[str]:
        """There are none, but names with something below them."""
        return [one for one, kind in sorted(self._kinds(name).items()) if kind == "directory"]

    def _kinds(self, name: str) -> dict[str, str]:
        path = self._path(name)

        def find() -> dict[str, str]:
            try:
                found: list[dict[str, Any]] = self._call("ls", path, detail=True)
            except FileNotFoundError:
                return {}
            # A folder that a browser of the store has made is an empty object with the folder's own name.
            below = {entry["name"].rstrip("/"): entry["type"] for entry in found}
            return {entry.rsplit("/", 1)[-1]: kind for entry, kind in below.items() if entry != path}

        return self.again(f"listing {name or 'all'} of", find)


def positive_number(variable: str, default: float) -> float:
    """An environment variable as a number. Raises ValueError, naming it, for what is none or isn't above 0."""
    text = os.environ.get(variable, "")
    try:
        number = float(text) if text else default
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"the environment variable {variable}={text} must be a number above 0")
    return number


def _options(scheme: str, timeout: float) -> dict[str, Any]:
    """Options that make a client give up on a silent connection, and leave retries to us."""
    if EXTRAS.get(scheme) != "s3":
        return {}
    config = {"connect_timeout": timeout, "read_timeout": timeout, "retries": {"total_max_attempts": 1}}
    options: dict[str, Any] = {"config_kwargs": config, "use_listings_cache": False}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        # boto reads these variables too. But fsspec keeps clients by their options, and would give one of an
        # endpoint that was set before.
        options["endpoint_url"] = endpoint
    return options


class _Upload(io.RawIOBase):
    """Collects a new file in a local temporary one and uploads it when closed: a failed upload needs the bytes
    again, and the state that they were made from may have changed by then.

    Left with an exception, or never closed, it uploads nothing.
    """

    def __init__(self, files: RemoteFiles, name: str, spool: Any) -> None:
        self._files, self._name, self._spool = files, name, spool

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return self._spool.write(data)
        except OSError as error:
            raise self._local(error) from error

    def flush(self) -> None:
        if not self._spool.closed:
            try:
                self._spool.flush()
            except OSError as error:
                raise self._local(error) from error

    def _local(self, error: OSError) -> OSError:
        found = explained(error, temporary_folder()) or error
        text = f"{found.strerror}; {self._name} is collected there, set TMPDIR to a folder with room"
        return type(found)(found.errno, text)

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
            self._files.put(self._spool.name, self._name)
        finally:
            self.discard()

    def discard(self) -> None:
        """Close it without uploading."""
        self._spool.close()
        super().close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        self.discard()  # the base class would close it


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

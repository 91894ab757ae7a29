"""Where text lies: files on a disk, or at a URL through fsspec.

FSDP2_REMOTE_ATTEMPTS  how often a read at a URL is tried, with growing pauses; 6
"""

from __future__ import annotations

import glob
import io
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import unquote, urlsplit

from fsdp2.data.errors import UnusableText
from fsdp2.units import install

T = TypeVar("T")

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
BLOCK = 8 << 20  # bytes that a URL is asked for at a time
FIRST_PAUSE_SECONDS = 0.5
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
# By which the stores of fsspec tell a content from a later one. All else may change from one answer to the next.
VERSIONS = ("ETag", "etag", "Content-MD5", "Digest", "md5Hash", "blob_id", "VersionId", "generation", "mtime")
DATES = ("LastModified", "Last-Modified", "last_modified", "updated", "created")
# What no second attempt changes: by the name of the error, and by the status of an answer.
FINAL = {"FileNotFoundError", "PermissionError", "IsADirectoryError", "NoCredentialsError", "PartialCredentialsError"}
ASK_AGAIN = (408, 429)


class Unreachable(UnusableText):
    """A URL whose server doesn't answer as it should, however often it is asked."""


@dataclass(frozen=True)
class File:
    """A file as it was when it was found.

    Attributes:
        name: an absolute path, or a URL.
        size: in bytes.
        state: another one when the content is another one, as far as its place tells.
    """

    name: str
    size: int
    state: str

    @property
    def suffix(self) -> str:
        """See `suffix_of`."""
        return suffix_of(self.name)

    def open(self) -> BinaryIO:
        """The file from its beginning. Raises UnusableText if it has changed since it was found."""
        self.require_unchanged()
        if not is_url(self.name):
            return open(self.name, "rb")
        files, path = _client(self.name)
        stream = files.open(path, "rb", block_size=BLOCK, cache_type="readahead")
        return cast(BinaryIO, io.BufferedReader(stream, min(BLOCK, 1 << 20)))

    def require_unchanged(self) -> None:
        """Raises UnusableText if the file isn't the one that was listed."""
        now = _at_url(self.name)[0] if is_url(self.name) else _on_disk(Path(self.name))
        if now != self:
            raise UnusableText(f"{self.name}: has changed while it was read; start again when it stays as it is")


def is_url(place: str) -> bool:
    """Return whether a place has a scheme, such as `s3://`."""
    return "://" in place


def is_http(place: str) -> bool:
    """Return whether a place is one of http, whose names may be percent-encoded and have a query behind them."""
    return place.startswith(("http://", "https://"))


def listed(place: str) -> list[str]:
    """The paths, patterns, folders or URLs of a place, which commas separate unless a path with them exists."""
    return [place] if os.path.exists(os.path.expanduser(place)) else place.split(",")


def suffix_of(name: str) -> str:
    """`.txt` of a path, or of the path in a URL, in small letters. Only one of http has a query."""
    path = urlsplit(name).path if is_http(name) else name
    return PurePosixPath(path).suffix.lower()


def find(place: str, suffixes: tuple[str, ...] = SUFFIXES) -> list[File]:
    """The files of a place, in order: those of each that it lists.

    Raises UnusableText if there are none, or of a kind that isn't read.
    """
    found: list[File] = []
    for one in listed(place):
        files = _at_url(one, suffixes) if is_url(one) else _below(Path(os.path.expanduser(one)), suffixes)
        if not files:
            raise UnusableText(f"{one}: there is no file of text ({', '.join(suffixes)})")
        found += files
    if strange := next((file.name for file in found if file.suffix not in suffixes), None):
        raise UnusableText(f"{strange}: isn't of a type that is read here: {', '.join(suffixes)}")
    return found


def _below(path: Path, suffixes: tuple[str, ...]) -> list[File]:
    """A folder's files; a file; or those of a pattern. As much of a path as exists is itself, and no pattern."""
    there = next(one for one in (path, *path.parents) if os.path.exists(one))
    if there == path and os.path.isdir(path):
        below = (file for file in path.rglob("*") if suffix_of(file.name) in suffixes)
        # A pipe would never end; a link to nothing is refused below.
        found = sorted((file for file in below if file.is_file() or not file.exists()), key=str)
    else:
        matching = glob.glob(str(path.relative_to(there)), root_dir=there, recursive=True)
        found = [
            file for file in ([path] if there == path else map(there.joinpath, sorted(matching))) if file.is_file()
        ]
    return [_on_disk(file.absolute()) for file in found]


def _on_disk(path: Path) -> File:
    try:
        facts = path.stat()
    except OSError as error:
        raise UnusableText(f"{path}: can't be read ({error.strerror})") from None
    # Who copies a file may set its date of change; that of its entry is the file system's own.
    return File(str(path), facts.st_size, f"{facts.st_mtime_ns} {facts.st_ctime_ns}")


def _client(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it. Raises UnusableText, naming the extra to install."""
    import fsspec

    scheme = url.partition("://")[0]
    try:
        return cast(tuple[Any, str], fsspec.core.url_to_fs(url))
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        fix = install(extra) if extra else " ".join(str(error).split())
        raise UnusableText(f"{scheme}:// needs a package that isn't installed; {fix}") from None
    except ValueError as error:
        raise UnusableText(f"{url}: is no URL that fsspec reads ({' '.join(str(error).split())[:120]})") from None


def _at_url(url: str, suffixes: tuple[str, ...] = SUFFIXES) -> list[File]:
    """The file of a URL, or those that a pattern or a folder there has. Raises UnusableText."""
    files, path = _client(url)

    def look() -> dict[str, Mapping[str, Any]]:
        if "*" in path:
            below = files.glob(path)
        elif (own := files.info(path))["type"] != "directory":
            return {path: own}
        else:
            below = [name for name in files.find(path) if suffix_of(name) in suffixes]
        # What a listing says of a file can be less than, and unlike, what the file says of itself later.
        return {name: files.info(name) for name in sorted(below, key=unquote if is_http(path) else str)}

    found = [
        (name if is_url(name) else files.unstrip_protocol(name), info)
        for name, info in patiently(url, look).items()
        if info["type"] == "file"
    ]
    if unknown := next((name for name, info in found if info.get("size") is None), None):
        raise UnusableText(f"{unknown}: its server doesn't report its size, so a part could pass for the whole")
    if unknown := next((name for name, info in found if not _state(info)), None):
        raise UnusableText(
            f"{unknown}: its server reports neither a version nor a date of it, so other text of its size could pass "
            "for it; download it"
        )
    return [File(name, int(info["size"]), _state(info)) for name, info in found]


def _state(info: Mapping[str, Any]) -> str:
    """Tell a file's content from a later one; its date counts where nothing better is known."""
    known = [f"{key}={info[key]}" for key in VERSIONS if info.get(key)]
    return " ".join(known or [f"{key}={info[key]}" for key in DATES if info.get(key)])


def _attempts() -> int:
    text = os.environ.get("FSDP2_REMOTE_ATTEMPTS") or "6"
    if not (text.isascii() and text.isdigit() and int(text)):
        raise UnusableText(f"the environment variable FSDP2_REMOTE_ATTEMPTS={text} must be a number above 0")
    return int(text)


def pause(url: str, error: Exception, attempt: int) -> None:
    """Wait before the next attempt, twice as long each time.

    Raises Unreachable after the last, and where no other would change the answer; UnusableText for a wrong variable.
    """
    status = getattr(error, "status", 0)
    refused = isinstance(status, int) and 400 <= status < 500 and status not in ASK_AGAIN
    final = refused or type(error).__name__ in FINAL
    if not final and attempt < _attempts():
        time.sleep(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
        return
    times = "failed" if final else f"failed {attempt} times, last"
    reason = " ".join(str(error).split())[:160]
    raise Unreachable(f"{url}: reading {times} with {type(error).__name__}: {reason}") from error


def patiently(url: str, operation: Callable[[], T]) -> T:
    """Ask a server until it answers. Raises Unreachable if it doesn't."""
    attempt = 0
    while True:
        try:
            return operation()
        except UnusableText:
            raise
        except Exception as error:  # each client raises errors of its own
            attempt += 1
            pause(url, error, attempt)

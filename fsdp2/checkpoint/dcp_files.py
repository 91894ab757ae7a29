"""DCP's storage writer and reader on top of our `Files`: every byte is hashed while it is written, and every
file operation goes through the object that fault tests replace.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import IO, Any, BinaryIO, cast

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsdp2.checkpoint.disk import disk_errors
from fsdp2.checkpoint.files import Files
from fsdp2.checkpoint.store import HASH, new_hash

# Small enough for the processor's cache, where the write then finds what the hash has read.
_PIECE_BYTES = 1 << 19


class HashingStream(io.RawIOBase):
    """Writes to a file and hashes what it is given, piece by piece. A hash in a thread beside the write took longer.

    The hash is of the bytes that were handed over, and not of what a disk made of them.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self._size = file, new_hash(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self._digest.update(piece)
            self._file.write(piece)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        return self._size

    def close(self) -> None:
        if not self.closed:
            self._file.close()
            super().close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            self._file.__exit__(kind, error, trace)  # a remote file that an error cut short isn't uploaded
        finally:
            super().close()

    def fingerprint(self) -> dict[str, Any]:
        """Size in bytes and BLAKE3 hash of all that was written."""
        return {"size": self._size, HASH: self._digest.hexdigest()}


class HashedRead(io.RawIOBase):
    """Reads from a file and hashes it on the way, in the order of the file and each byte once.

    What is skipped is read for the hash alone, so whoever reads parts by their offsets reads the file once.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self._hashed = cast(io.BufferedIOBase, file), new_hash(), 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        """Read bytes into the buffer, hashing those that no earlier read has; their number."""
        at = self._file.tell()
        if at > self._hashed:
            self._hash(at)
        count = self._file.readinto(buffer)
        new = max(0, at + count - self._hashed)
        self._digest.update(memoryview(buffer)[count - new : count])
        self._hashed += new
        return count

    def _hash(self, end: float = math.inf) -> None:
        """Read on from what is hashed; the file's position is then there."""
        self._file.seek(self._hashed)
        while piece := self._file.read(int(min(_PIECE_BYTES, end - self._hashed))):
            self._digest.update(piece)
            self._hashed += len(piece)

    def hexdigest(self) -> str:
        """The BLAKE3 hash of the whole file."""
        self._hash()
        return self._digest.hexdigest()


class DcpFiles(FileSystemBase):
    """The interface of DCP's file systems on `Files`. Paths are names relative to the checkpoint."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.written: dict[str, dict[str, Any]] = {}  # name -> fingerprint of what this rank has written

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        name = str(path)
        if mode == "rb":
            with self.files.open(name) as file:
                yield cast(io.IOBase, file)
            return
        stream = HashingStream(self.files.create(name))
        with stream:
            yield stream
        self.files.fsync(name)
        self.written[name] = stream.fingerprint()

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return ""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.files.rename(str(path), str(new_path))
        self.written[str(new_path)] = self.written.pop(str(path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """The store has made the directory before any rank writes."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self.files.size(str(path)) is not None

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self.files.unlink(str(path))


class Written(list[WriteResult]):
    """A rank's write results, and the fingerprints of its files, on their way to rank 0."""

    def __init__(self, results: list[WriteResult], files: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(results)
        self.files = dict(files)


class ShardWriter(dcp.FileSystemWriter):
    """Writes shards into a directory that `begin` makes, and ends with `commit` of all files' fingerprints.

    Both are called on rank 0 alone, inside DCP's own protocol: `begin` when all ranks have a plan and none has
    written, `commit` when all have said that their files are durable, and after `before_commit`. Before both,
    `still_ours` raises NotTheWriter if another run may have the place; so it does on any rank where a file operation
    has failed. A failure in any of them, or on any rank, is a failure of the save on every rank. DCP sends it there
    without what it was caused by, so a disk's error is put into words before.
    """

    def __init__(
        self,
        files: Files,
        begin: Callable[[], None],
        commit: Callable[[Mapping[str, Mapping[str, Any]]], None],
        still_ours: Callable[[], None] = lambda: None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        # Syncing is `DcpFiles`' work, so that it is seen by whatever stands in for the files.
        super().__init__("", sync_files=False)
        self.fs: Any = DcpFiles(files)
        self.path = ""
        self._begin, self._commit = begin, commit
        self.still_ours, self._before_commit = still_ours, before_commit

    @contextmanager
    def _failing_clearly(self, needed: int | None = None) -> Generator[None, None, None]:
        try:
            with disk_errors(self.fs.files, needed):
                yield
        except OSError:
            self.still_ours()
            raise

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # torch's would look for an older checkpoint in a directory that doesn't exist yet

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with self._failing_clearly():
            self.still_ours()
            self._begin()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        entries = (item.tensor_data for item in plan.items if item.tensor_data is not None)
        needed = sum(entry.chunk.sizes.numel() * entry.properties.dtype.itemsize for entry in entries)
        with self._failing_clearly(needed):
            results = super().write_data(plan, planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result(Written(results, self.fs.written))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self._failing_clearly():
            self.still_ours()  # .metadata replaces a file of that name
            super().finish(metadata, results)  # writes it
            files = dict(self.fs.written)
            for rank in results:
                files.update(cast(Written, rank).files)
            self._before_commit()
            self._commit(files)

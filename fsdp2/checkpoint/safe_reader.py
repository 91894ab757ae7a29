"""DCP's storage reader for what a stranger may have written."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Container, Mapping, Sequence
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fsdp2.checkpoint.archive import parse_archive
from fsdp2.checkpoint.dcp_files import DcpFiles, HashedRead
from fsdp2.checkpoint.files import Files, NotAFile
from fsdp2.checkpoint.metadata import load_metadata
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.store import MARKER, METADATA, ChangedFile, DamagedCheckpoint, new_hash


class SafeReader(dcp.FileSystemReader):
    """Reads a checkpoint without running code from it, stays inside it, and takes no more memory than its files have.

    Every method raises DamagedCheckpoint, naming the file and entry, for what isn't as it should be.
    """

    def __init__(
        self, files: Files, listed: Container[str] | None = None, hashes: Mapping[str, str] | None = None
    ) -> None:
        """A reader of a checkpoint's files.

        Args:
            listed: names of the files that a marker vouches for: no other is read.
            hashes: name -> BLAKE3 hash of files that are compared with it while they are read, and read as a whole.
        """
        super().__init__("")
        self.files, self.listed, self.hashes = files, listed, hashes or {}
        self.fs: Any = DcpFiles(files)
        self.path = ""
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises FileNotFoundError if there is none."""
        if self._metadata is None:
            try:
                content = self.files.read(METADATA)
                self._compare(METADATA, lambda: new_hash(content).hexdigest())
                self._metadata = load_metadata(content)
            except (Refused, ValueError) as error:
                raise DamagedCheckpoint(f"{self.files}: {METADATA} can't be used: it {error}") from None
            except NotAFile as error:
                raise DamagedCheckpoint(str(error)) from None
            read = {METADATA} | {info.relative_path for info in self._metadata.storage_data.values()}
            if self.listed is not None and (unlisted := sorted(name for name in read if name not in self.listed)):
                raise DamagedCheckpoint(f"{self.files}: {unlisted[0]} is read and not listed in {MARKER}")
            assert self._metadata.storage_meta is not None
            self._metadata.storage_meta.load_id = self.load_id  # as the base class does
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read as the base class does, and check that it is what `.metadata` says."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._place(item).relative_path, []).append(item)
        unread = sorted(self.hashes.keys() - by_file.keys() - {METADATA})
        for name, items in [*by_file.items(), *((name, []) for name in unread)]:
            try:
                with self.fs.create_stream(name, "rb") as stream:
                    self._read_file(name, items, planner, stream)
            except (FileNotFoundError, NotAFile) as error:
                what = items[0].dest_index.fqn if items else name
                raise DamagedCheckpoint(f"{self.files}: {what} can't be read ({error})") from None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_file(self, name: str, items: Sequence[ReadItem], planner: LoadPlanner, stream: IO[bytes]) -> None:
        size = stream.seek(0, os.SEEK_END)  # once: it drops what was read ahead
        if name not in self.hashes:
            for item in items:
                self._read_item(item, planner, stream, size)
            return
        hashed = HashedRead(stream)
        failure: Exception | None = None
        try:
            for item in sorted(items, key=lambda item: int(self._place(item).offset)):
                self._read_item(item, planner, cast(IO[bytes], hashed), size)
        except Exception as error:  # if the file is damaged, that says more
            failure = error
        self._compare(name, hashed.hexdigest)
        if failure is not None:
            raise failure

    def _compare(self, name: str, digest: Callable[[], str]) -> None:
        if name in self.hashes and digest() != self.hashes[name]:
            raise ChangedFile(f"{self.files}: {name} differs from what was committed")

    def _place(self, item: ReadItem) -> Any:
        try:
            return self.storage_data[item.storage_index]
        except KeyError:
            name = item.storage_index.fqn
            raise DamagedCheckpoint(f"{self.files}: {name} is not in {METADATA}'s list of what is where") from None

    def _read_item(self, item: ReadItem, planner: LoadPlanner, stream: IO[bytes], size: int) -> None:
        name, place = item.storage_index.fqn, self._place(item)
        try:
            content = read_slice(stream, size, place.offset, place.length)
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(content))
                return
            saved = parse_archive(content)
            if problem := self._differs(saved, item):
                raise Refused(problem)
            ranges = zip(item.storage_offsets, item.lengths, strict=True)
            part = saved[tuple(slice(start, start + length) for start, length in ranges)]
            target = planner.resolve_tensor(item).detach()
            if not target.shape == part.shape == item.lengths:
                raise Refused(f"has the shape {tuple(part.shape)} for a target of {tuple(target.shape)}")
            target.copy_(part)
            planner.commit_tensor(item, target)
        except (Refused, RuntimeError) as error:  # torch has too little memory, or a range leads out of a tensor
            reason = f"its part of {place.relative_path} {' '.join(str(error).split())}"
            raise DamagedCheckpoint(f"{self.files}: {name} can't be read: {reason}") from None

    def _differs(self, saved: Any, item: ReadItem) -> str | None:
        assert self._metadata is not None
        entry = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[item.storage_index.fqn])
        offset = item.storage_index.offset
        sizes = [chunk.sizes for chunk in entry.chunks if offset is None or chunk.offsets == offset]
        if not isinstance(saved, Tensor):
            return f"is a {type(saved).__name__} and no tensor"
        if saved.dtype != entry.properties.dtype or saved.shape not in sizes:
            return f"is {saved.dtype} {tuple(saved.shape)}, and {METADATA} says another thing"
        return None


def read_slice(stream: IO[bytes], size: int, offset: int, length: int) -> memoryview:
    """Bytes of a file of that size, in memory of their own. Raises Refused if the file is shorter."""
    if offset + length > size:
        raise Refused(f"should end at {offset + length}, and the file has {size} bytes")
    content = torch.empty(length, dtype=torch.uint8).numpy().data
    stream.seek(offset)
    at = 0
    while at < length:
        count = cast(io.BufferedIOBase, stream).readinto(content[at:])
        if not count:
            raise Refused("ends early")
        at += count
    return content

"""Read the tensors of a DCP directory one at a time, in one process and without a process group."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Generator, Iterable
from contextlib import contextmanager
from io import IOBase
from os import PathLike
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fsdp2.checkpoint.archive import parse_archive
from fsdp2.checkpoint.dcp_files import DcpFiles
from fsdp2.checkpoint.files import Files
from fsdp2.checkpoint.metadata import TreePath, misses
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.safe_reader import SafeReader
from fsdp2.checkpoint.store import METADATA, DamagedCheckpoint, require_file

# A remote file reads ahead, which is lost when it is closed; a thousand ranks' shards can't all be open.
_KEPT_OPEN = 8


class DcpTensors:
    """The tensors and plain values of a DCP directory. Close it after use.

    Attributes:
        tensors: name -> tensor on `meta`, with the shape and dtype.
        values: names of what isn't a tensor.
        paths: name -> its place in the nested state dict that was saved.

    Raises FileNotFoundError without `.metadata`, and DamagedCheckpoint if that can't be used.
    """

    def __init__(self, files: Files, listed: Container[str] | None = None) -> None:
        """`listed` are the names of the files that a marker vouches for, if there is one: no other is read."""
        self.files = files
        self._streams = _KeptOpen(files)
        self._reader = SafeReader(files, listed)
        self._reader.fs = self._streams
        self.tensors: dict[str, Tensor] = {}
        self.values: list[str] = []
        self._sizes: dict[str, int] = {}  # of files
        self.paths: dict[str, TreePath] = {}
        try:
            metadata = self._reader.read_metadata()
        except BaseException:
            self.close()
            raise
        self._reader.set_up_storage_reader(metadata, True)
        self._entries, self._places = metadata.state_dict_metadata, metadata.storage_data
        for name, entry in self._entries.items():
            self.paths[name] = _path(name, metadata.planner_data)
            if isinstance(entry, BytesStorageMetadata):
                self.values.append(name)
            else:
                self.tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def files_of_values(self) -> set[str]:
        """Names of the files that plain values are in."""
        values = set(self.values)
        return {place.relative_path for index, place in self._places.items() if index.fqn in values}

    def close(self) -> None:
        """Close the files."""
        self._streams.close()

    def read(self, name: str) -> Any:
        """A whole tensor on the CPU, or a plain value. Raises DamagedCheckpoint that names it."""
        if name in self.values:
            planner = _Receiver(None)
            whole = MetadataIndex(name)
            self._read(name, [_item(LoadItemType.BYTE_IO, whole, whole, torch.Size((0,)))], planner)
            return planner.value
        return self.read_part(name, tuple(slice(0, size) for size in self.tensors[name].shape))

    def read_part(self, name: str, ranges: tuple[slice, ...]) -> Tensor:
        """A range of each dimension of a tensor, on the CPU; of the files, the chunks that it lies in are read.

        Raises DamagedCheckpoint, or Refused if the memory isn't free.
        """
        entry = cast(TensorStorageMetadata, self._entries[name])
        self._require_whole(name, entry)
        starts, sizes = (torch.Size(one) for one in ([r.start for r in ranges], [r.stop - r.start for r in ranges]))
        target = self._allocate(name, entry.chunks, sizes)
        box = ChunkStorageMetadata(starts, sizes)
        self._read(name, create_read_items_for_chunk_list(name, entry, [box]), _Receiver(target))
        return target

    def problems(self, look: Callable[[str, Tensor], None] = lambda name, chunk: None) -> list[str]:
        """List what can't be read, after reading all of it, one chunk at a time, which `look` gets.

        Raises Refused if the memory for a chunk isn't free.
        """
        found = []
        for name, entry in self._entries.items():
            try:
                if isinstance(entry, BytesStorageMetadata):
                    self.read(name)
                    continue
                self._require_whole(name, entry)
                for chunk in entry.chunks:
                    origin = MetadataIndex(name, [0] * len(chunk.sizes))
                    item = _item(LoadItemType.TENSOR, origin, MetadataIndex(name, chunk.offsets), chunk.sizes)
                    target = self._allocate(name, [chunk], chunk.sizes)
                    self._read(name, [item], _Receiver(target))
                    look(name, target)
            except DamagedCheckpoint as error:
                found.append(str(error).removeprefix(f"{self.files}: "))
        return found

    def _require_whole(self, name: str, entry: TensorStorageMetadata) -> None:
        problem = misses(entry.size, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
        if problem:
            raise DamagedCheckpoint(f"{self.files}: {name} is not whole in {METADATA}: {problem}")

    def _allocate(self, name: str, chunks: Iterable[ChunkStorageMetadata], size: torch.Size) -> Tensor:
        """Memory for a part of a tensor, of which the files must have the bytes: a number in a file is none."""
        needed = math.prod(size) * self.tensors[name].itemsize
        stored = self._stored(name, chunks) if needed else 0
        if stored < needed:
            raise DamagedCheckpoint(f"{self.files}: {name} needs {needed} bytes, and its files have {stored}")
        try:
            return torch.empty(size, dtype=self.tensors[name].dtype)
        except RuntimeError as error:
            raise Refused(f"{self.files}: {name} needs {needed} bytes of memory, which aren't free") from error

    def _stored(self, name: str, chunks: Iterable[ChunkStorageMetadata]) -> int:
        """Bytes of the files that chunks are in; those that several are in count once."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for index in (MetadataIndex(name, chunk.offsets) for chunk in chunks):
            if index not in self._places:
                raise DamagedCheckpoint(f"{self.files}: {name} is not in {METADATA}'s list of what is where")
            place = self._places[index]
            ranges.setdefault(place.relative_path, []).append((place.offset, place.offset + place.length))
        total = 0
        for file, found in ranges.items():
            if file not in self._sizes:
                self._sizes[file] = require_file(self.files, file)
            last = 0
            for start, end in sorted(found):
                end = min(end, self._sizes[file])
                total += max(0, end - max(start, last))
                last = max(last, end)
        return total

    def _read(self, name: str, items: list[ReadItem], planner: _Receiver) -> None:
        self._reader.read_data(LoadPlan(items), planner).wait()


def _path(name: str, paths: dict[str, TreePath]) -> TreePath:
    """A name's place in the state dict that was saved."""
    if name in paths:
        return paths[name]
    # Saved without: our names and the tutorials' can still be told.
    return ("app", "model", name[len("app.model.") :]) if name.startswith("app.model.") else (name,)


def _item(kind: LoadItemType, target: MetadataIndex, stored: MetadataIndex, lengths: torch.Size) -> ReadItem:
    """Read all of one chunk or value, from its start."""
    zeros = torch.Size([0] * len(lengths))
    return ReadItem(
        type=kind, dest_index=target, dest_offsets=zeros, storage_index=stored, storage_offsets=zeros, lengths=lengths
    )


class _Receiver(DefaultLoadPlanner):
    """Takes what the reader finds: into one tensor, or as one plain value."""

    def __init__(self, target: Tensor | None) -> None:
        super().__init__()
        self.target, self.value = target, None

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert self.target is not None
        return self.target

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.value = parse_archive(value.getbuffer())


class _KeptOpen(DcpFiles):
    """Keeps the files that were read last open, for the next tensor."""

    def __init__(self, files: Files) -> None:
        super().__init__(files)
        self._open: dict[str, BinaryIO] = {}

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Generator[IOBase, None, None]:
        name = str(path)
        # Put last, as the one used last.
        self._open[name] = self._open.pop(name) if name in self._open else self.files.open(name)
        while len(self._open) > _KEPT_OPEN:
            self._open.pop(next(iter(self._open))).close()
        yield cast(IOBase, self._open[name])

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

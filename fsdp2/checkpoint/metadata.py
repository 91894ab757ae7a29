"""DCP's `.metadata` is a pickle of torch's classes. It is read as inert data, and torch's objects are built of that
here, each field checked: its text, numbers and names are a stranger's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp2.checkpoint.files import file_name
from fsdp2.checkpoint.pickles import Make, Unread, new_dict, unpickle
from fsdp2.checkpoint.refusal import Refused

TreePath = tuple[str | int, ...]  # where something is in a nested state dict: ("app", "model", "conv.weight")

_MAX_DIMENSIONS = 64
_MAX = 1 << 63

_TORCH = "torch.distributed.checkpoint.metadata."
# Until torch 2.2 a tensor's properties were a class of sharded tensors.
_OLD = "torch.distributed._shard.sharded_tensor.metadata."
_ALLOWED = {
    *(_TORCH + name for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *(_TORCH + name for name in ("StorageMeta", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    *(_OLD + name for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    # Of what isn't looked at: the place that was saved to, and how tensors lay in memory.
    *("pathlib.PosixPath", "pathlib._local.PosixPath", "builtins.set", "torch.serialization._get_layout"),
}


_KNOWN: dict[str, Make] = {"torch.Size": lambda numbers: sizes(numbers, "size"), "collections.OrderedDict": new_dict}


def load_metadata(data: bytes) -> Metadata:
    """The metadata in the bytes of a `.metadata`. Raises Refused for anything else, naming what is wrong with it."""
    try:
        tree = unpickle(data, _KNOWN, is_allowed=_ALLOWED.__contains__)
    except Refused as error:
        why = ", which a checkpoint's metadata never holds; it was not loaded" if "asks for" in str(error) else ""
        raise Refused(f"{error}{why}") from None
    try:
        return _metadata(tree, len(data))
    except KeyError as error:
        raise Refused(f"has an entry without {error}") from None


def _metadata(tree: Any, size: int) -> Metadata:
    whole = _fields(tree, "Metadata")
    entries = _a(dict, whole.get("state_dict_metadata"), "list of entries")
    places = _a(dict, whole.get("storage_data"), "list of what is where")
    tensors = [_fields(entry, "TensorStorageMetadata") for entry in entries.values() if not _is_value(entry)]
    if sum(len(_a(list, fields["chunks"], "list of chunks")) for fields in tensors) > size:
        raise Refused("has lists of chunks that many tensors share")
    return Metadata(
        state_dict_metadata={_a(str, name, "name"): _entry(name, entry) for name, entry in entries.items()},
        planner_data=_paths(whole.get("planner_data")),
        storage_data={_index(index): _place(index, info) for index, info in places.items()},
        storage_meta=StorageMeta(),
    )


def _a(kind: Any, value: Any, what: str) -> Any:
    # bool is an int to isinstance; none of these fields is one.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise Refused(f"holds {_short(value)} where a {what} belongs")
    return value


def _short(value: Any) -> str:
    return repr(value)[:60] if isinstance(value, (str, int, float, Unread, type(None))) else f"a {type(value).__name__}"


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """The fields of a stand-in for one of torch's dataclasses."""
    if not isinstance(value, Unread) or value.named.rpartition(".")[2] != kind:
        raise Refused(f"holds {_short(value)} where a {kind} belongs")
    fields: dict[str, Any] = _a(dict, value.state, f"{kind}'s fields")
    return fields


def _is_value(entry: Any) -> bool:
    return isinstance(entry, Unread) and entry.named == f"{_TORCH}BytesStorageMetadata" and entry.arguments == ()


def sizes(value: Any, what: str) -> torch.Size:
    """A shape, checked: integers from 0 up, few enough, whose product is no absurd number. Raises Refused."""
    if isinstance(value, torch.Size):
        return value  # made and checked below
    numbers = _a((tuple, list), value, what)
    if len(numbers) > _MAX_DIMENSIONS or not all(type(one) is int and 0 <= one < _MAX for one in numbers):
        raise Refused(f"has a {what} that isn't valid")
    if math.prod(one or 1 for one in numbers) >= _MAX:  # strides are products of these, of an empty tensor too
        raise Refused(f"has a {what} beyond what any tensor has")
    return torch.Size(numbers)


def _entry(name: str, entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _is_value(entry):
        return BytesStorageMetadata()
    try:
        return _tensor(entry)
    except Refused as error:
        raise Refused(f"{error}, for {_short(name)}") from None


def _tensor(entry: Any) -> TensorStorageMetadata:
    fields = _fields(entry, "TensorStorageMetadata")
    size = sizes(fields["size"], "size")
    properties = fields["properties"]
    state = properties.state if isinstance(properties, Unread) else None
    if not (isinstance(state, tuple) and state and isinstance(state[0], torch.dtype)):
        raise Refused("has no dtype")
    if math.prod(size) * state[0].itemsize >= _MAX:
        raise Refused("has a size beyond what any tensor has")
    chunks = []
    for chunk in fields["chunks"]:
        box = _fields(chunk, "ChunkStorageMetadata")
        chunks.append(ChunkStorageMetadata(sizes(box["offsets"], "chunk's place"), sizes(box["sizes"], "size")))
    return TensorStorageMetadata(TensorProperties(dtype=state[0]), size, chunks)


def _index(index: Any) -> MetadataIndex:
    fields = _fields(index, "MetadataIndex")
    name, offset, number = _a(str, fields["fqn"], "name"), fields.get("offset"), fields.get("index")
    return MetadataIndex(
        name,
        None if offset is None else sizes(offset, f"chunk's place for {_short(name)}"),
        None if number is None else _a(int, number, "number"),
    )


def _place(index: Any, info: Any) -> _StorageInfo:
    fields = _fields(info, "_StorageInfo")
    if fields.get("transform_descriptors"):
        raise Refused("has shards that are compressed or transformed in another way, which is not supported here")
    offset, length = (_a(int, fields[name], name) for name in ("offset", "length"))
    if not (0 <= offset < _MAX and 0 <= length < _MAX):
        raise Refused(f"has an entry of {length} bytes at {offset}")
    file = _a(str, fields["relative_path"], "file's name")
    try:
        return _StorageInfo(file_name(file), offset, length)
    except ValueError as error:
        raise Refused(f"names a file, and {error}") from None


def _paths(paths: Any) -> dict[str, TreePath]:
    """Name -> place in the state dict that was saved, which torch notes since 2.0 for whatever it flattened."""
    if not isinstance(paths, dict):
        return {}
    for name, path in paths.items():
        are_parts = isinstance(path, tuple) and path and all(type(part) in (str, int) for part in path)  # bool is none
        if not (isinstance(name, str) and are_parts):
            raise Refused(f"has {_short(path)} as the path of {_short(name)}")
    return paths


def misses(size: Sequence[int], chunks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """The way chunks, (offsets, sizes) each, fail to cover a tensor exactly; None if they do. Equal ones count once."""
    boxes = {(tuple(offsets), tuple(sizes)) for offsets, sizes in chunks}
    for offsets, sizes in boxes:
        fits = len(offsets) == len(sizes) == len(size) and all(
            0 <= start <= start + length <= whole for start, length, whole in zip(offsets, sizes, size, strict=True)
        )
        if not fits:
            return f"a chunk of {sizes} at {offsets} lies outside of {tuple(size)}"
    filled = sorted(box for box in boxes if math.prod(box[1]))
    covered, total = sum(math.prod(sizes) for _, sizes in filled), math.prod(size)
    if covered != total:
        return f"its chunks have {covered} of {total} elements"
    return "its chunks overlap" if len(filled) > 1 and _overlap(filled) else None


def _overlap(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Return whether two boxes share an element. Along the axis that is cut most, only neighbours are compared."""
    dims = range(len(boxes[0][0]))
    axis = max(dims, key=lambda dim: len({offsets[dim] for offsets, _ in boxes}))
    reaching: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offsets, sizes in sorted(boxes, key=lambda box: box[0][axis]):
        reaching = [box for box in reaching if box[0][axis] + box[1][axis] > offsets[axis]]
        for others, lengths in reaching:
            if all(others[d] < offsets[d] + sizes[d] and offsets[d] < others[d] + lengths[d] for d in dims):
                return True
        reaching.append((offsets, sizes))
    return False

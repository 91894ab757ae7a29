"""Safetensors: one file, or Hugging Face's folder of several with an index.

    8 bytes: length of the header; the header, JSON: {name: {"dtype", "shape", "data_offsets"}}; the tensors

Its package looks at a file first, since it knows what to refuse in a stranger's. The bytes are read and written here:
the package maps a file, whose pages count as memory of the process until it is closed, and to write it wants all
tensors of a file in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fsdp2.checkpoint.files import Files, LocalFiles, file_name, inside
from fsdp2.checkpoint.metadata import sizes
from fsdp2.checkpoint.refusal import Refused, one_line
from fsdp2.checkpoint.safe_reader import read_slice
from fsdp2.checkpoint.sources.source import Source, local_copy
from fsdp2.checkpoint.spool import raw_bytes
from fsdp2.checkpoint.store import INDEX
from fsdp2.units import install

DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


def read_index(place: str, folder: Files, index: str = INDEX) -> dict[str, set[str] | None]:
    """File -> names of its tensors. Raises Refused."""
    files: dict[str, set[str] | None] = {}
    try:
        for name, file in json.loads(folder.read(index))["weight_map"].items():
            names = files.setdefault("/".join(map(file_name, inside(file).split("/"))), set())
            assert names is not None
            names.add(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"{place}: {index} can't be used ({one_line(error)})") from None
    return files


def open_safetensors(place: str, folder: Files, files: Mapping[str, set[str] | None], stack: ExitStack) -> Source:
    """Open files, mapped until the stack is left; for each the names it must have, or None. Raises Refused."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise Refused(
            f"{place}: reading safetensors needs a package that isn't installed; {install('safetensors')}"
        ) from None
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    tensors: dict[str, Tensor] = {}
    places: dict[str, tuple[BinaryIO, int, int]] = {}  # the file that a tensor is in, its size, where it begins there
    for file, expected in files.items():
        if folder.size(file) is None:
            raise Refused(f"{place}: {file} is missing, which {INDEX} names")
        path = local_copy(folder, file, stack)
        try:
            with safe_open(str(path), framework="pt", device="cpu"):
                pass
        except SafetensorError as error:
            raise Refused(f"{place}: {file} is not a complete safetensors file ({one_line(error)})") from None
        stream = stack.enter_context(LocalFiles(path.parent).open(path.name))
        try:
            size, start, entries = read_header(stream)
        except ValueError as error:
            raise Refused(f"{place}: {file} is not a complete safetensors file ({error})") from None
        if expected is not None and (wrong := sorted(expected ^ entries.keys())):
            raise Refused(f"{place}: {file} and {INDEX} disagree about {', '.join(wrong[:3])}")
        for name, entry in entries.items():
            if entry["dtype"] not in dtypes:
                raise Refused(f"{place}: {name} is {entry['dtype']}, a type that isn't known here")
            try:
                shape = sizes(entry["shape"], "shape")
            except Refused as error:
                raise Refused(f"{place}: {name} {error}") from None
            tensors[name] = torch.empty(shape, dtype=dtypes[entry["dtype"]], device="meta")
            places[name] = stream, size, start + entry["data_offsets"][0]

    def part(name: str, ranges: tuple[slice, ...]) -> Tensor:
        shape, dtype = tensors[name].shape, tensors[name].dtype
        # Rows lie one after the other: what is read for nothing is what a range of another dimension leaves out.
        rows, *others = ranges or (slice(0, 1),)
        row = shape[1:].numel() * dtype.itemsize
        stream, size, start = places[name]
        wanted = torch.Size([rows.stop - rows.start, *shape[1:]]) if ranges else shape
        if not wanted.numel():
            return torch.empty(wanted, dtype=dtype)[(slice(None), *others)]
        content = read_slice(stream, size, start + rows.start * row, wanted.numel() * dtype.itemsize)
        found = torch.frombuffer(content, dtype=dtype).view(wanted)
        return found[(slice(None), *others)] if others else found

    def read(name: str) -> Tensor:
        return part(name, tuple(slice(0, size) for size in tensors[name].shape))

    return Source(place, tensors, [], {name: (name,) for name in tensors}, read, part=part)


def read_header(stream: BinaryIO) -> tuple[int, int, dict[str, dict[str, Any]]]:
    """Of a file that the package has looked at: its size, where its tensors begin, and what the header says of each.

    Raises Refused for a name that stands in it twice, of which the package takes the last.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise Refused("its header has the same name twice")
        return found

    size = stream.seek(0, os.SEEK_END)
    length = int.from_bytes(read_slice(stream, size, 0, 8), "little")
    entries = json.loads(bytes(read_slice(stream, size, 8, length)), object_pairs_hook=unique)
    entries.pop("__metadata__", None)
    return size, 8 + length, entries


def shards_of(tensors: Mapping[str, Tensor], max_shard_size: int) -> dict[str, dict[str, Tensor]]:
    """File -> the tensors in it; one file is `model.safetensors`.

    Raises Refused, naming the tensor, for what the format doesn't have.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise Refused(f"--format safetensors: {name} is {tensor.dtype}, which the format doesn't have; use pt")
        if name == "__metadata__":
            raise Refused("--format safetensors: a tensor has the name __metadata__, which isn't free there; use pt")
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + tensor.nbytes > max_shard_size:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}


def write_index(folder: LocalFiles, files: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write the index that says which tensor is in which file, if there are several."""
    if len(files) == 1:
        return
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    folder.write(INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
    folder.fsync(INDEX)


def layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file, and where each of its tensors begins, in the order in which they stand in it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Wider types first, so that each tensor is aligned to its own.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    at = 0
    for name in order:
        tensor = tensors[name]
        span = [at, at + tensor.nbytes]
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    return start, {name: len(start) + header[name]["data_offsets"][0] for name in order}


def write_file(folder: LocalFiles, file: str, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """Write one file of tensors, one after the other."""
    start, places = layout(tensors)
    with folder.create(file) as target:
        target.write(start)
        for name in places:
            target.write(raw_bytes(read(name)))
    folder.fsync(file)

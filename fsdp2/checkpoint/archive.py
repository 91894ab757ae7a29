"""Read a file of torch.save without torch.load: no code is run, and memory is bounded by the file's size.

    archive/data.pkl    a pickle of the objects, with a persistent id for each tensor's memory
    archive/data/0 …    those memories

`weights_only` alone isn't enough for a stranger's file: an entry may be compressed, so that 3 MB become 3.5 GB, and the
pickle may allocate. torch itself compresses nothing; here such a file is refused.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp2.checkpoint.files import LocalFiles, NotAFile
from fsdp2.checkpoint.metadata import sizes
from fsdp2.checkpoint.pickles import Make, Unread, new_dict, require_small, unpickle
from fsdp2.checkpoint.refusal import Refused

_HEADER = struct.Struct("<4s22xHH")  # of an entry: its name and extra field follow, then its bytes
# The class that a file names for a tensor's memory. Newer dtypes come with UntypedStorage and a name of their own.
_STORAGES: dict[str, torch.dtype] = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.storage.UntypedStorage": torch.uint8,
}


def load_archive(path: Path) -> Any:
    """Load a file of torch.save, its tensors mapped from the file.

    Raises Refused, with a reason that reads on from the name of the file, or OSError.
    """
    return parse_archive(memoryview(mapped(path)))


def mapped(path: Path) -> mmap.mmap:
    """The bytes of a file, read when they are used. Raises Refused if it is empty, or OSError."""
    with LocalFiles(path.parent).open(path.name) as file:
        if not os.fstat(file.fileno()).st_size:
            raise Refused("is empty")
        try:  # private and not read-only, as torch wants it; nobody writes to it
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:  # of a file larger than memory and swap
            raise NotAFile(f"{path} can't be mapped into memory ({error.strerror})") from None


def forget(memory: mmap.mmap) -> None:
    """Let go of the pages of a mapped file, which count as memory of the process. They are read again when used."""
    if hasattr(mmap, "MADV_DONTNEED"):  # on Linux; elsewhere the kernel takes them when it needs them
        memory.madvise(mmap.MADV_DONTNEED)


def parse_archive(content: memoryview, *, objects: bool = False) -> Any:
    """The same of bytes, which the tensors stay in. With `objects`, those of unknown classes become `Unread`; else they
    are refused. Raises Refused."""
    try:
        archive = _Archive(content, objects)
    except Refused:
        raise
    except (zipfile.BadZipFile, struct.error, RuntimeError, ValueError, LookupError, OSError):
        raise Refused(
            "is not a complete archive of torch.save: it is damaged, or older than torch 1.6 and has to be saved again"
        ) from None
    return archive.load()


class _View(io.RawIOBase):
    """A file of what is in memory, which isn't copied."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._at = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._content)}[whence]
        if self._at < 0:
            raise ValueError("before the beginning")
        return self._at

    def readinto(self, buffer: Any) -> int:
        piece = self._content[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


class _Archive:
    """Raises Refused or what zipfile raises, if it is none."""

    def __init__(self, content: memoryview, objects: bool) -> None:
        self.content, self.objects = content, objects
        with zipfile.ZipFile(_View(content)) as archive:
            infos = archive.infolist()
        self.entries = {info.filename: info for info in infos}
        if any(name.endswith("/constants.pkl") for name in self.entries):
            raise Refused("is TorchScript, which holds code; save the state dict")
        if any(info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size for info in infos):
            raise Refused("has compressed entries, which torch.save never writes; it was not unpacked")
        if infos and min(info.header_offset for info in infos) > 0:
            raise Refused("has bytes before it, of another archive perhaps, which torch.save never writes")
        if sum(info.file_size for info in infos) > len(content):
            raise Refused("has entries that overlap, which torch.save never writes; it was not read")
        (pickled,) = (name for name in self.entries if name.count("/") == 1 and name.endswith("/data.pkl"))
        self.folder = pickled.removesuffix("data.pkl")
        self.pickled = bytes(self._bytes("data.pkl"))
        if f"{self.folder}byteorder" in self.entries and bytes(self._bytes("byteorder")) != b"little":
            raise Refused("was saved on a machine of another byte order; save it on one like this")
        self.budget = 3 * len(self.pickled)
        self.known: dict[str, Make] = {}
        self.memories: dict[tuple[str, torch.dtype], Tensor] = {}

    def load(self) -> Any:
        self.known = {
            **_KNOWN,
            "torch._tensor._rebuild_from_type_v2": self._from_type,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_of_bytes,
            "_codecs.encode": self._encoded,
            "builtins.bytearray": lambda raw=b"": bytearray(self._paid(raw)),
            "builtins.set": lambda items=(): self._paid_set(items),
        }
        is_allowed: Callable[[str], bool] = (lambda name: True) if self.objects else {*_STORAGES, *_PLAIN}.__contains__
        try:
            tree = unpickle(self.pickled, self.known, is_allowed=is_allowed, persistent=self._memory)
        except Refused as error:
            if not str(error).startswith("asks for "):
                raise
            named = str(error).removeprefix("asks for ")
            text = f"holds a {named}, and only plain tensors with data and plain values are read; save those alone"
            raise Refused(text) from None
        finally:
            self.known = {}  # which refer to this object: in a cycle, the memory would stay for a while
        require_small(tree, 16 * len(self.pickled) + 10_000)
        return tree

    def _bytes(self, name: str) -> memoryview:
        info = self.entries[self.folder + name]
        signature, name_length, extra_length = _HEADER.unpack_from(self.content, info.header_offset)
        start = info.header_offset + _HEADER.size + name_length + extra_length
        if signature != b"PK\x03\x04" or start + info.file_size > len(self.content):
            raise ValueError("an entry isn't where the directory says")
        return self.content[start : start + info.file_size]

    # --- what a pickle's names make. Whatever these raise, the file is refused. ---

    def _memory(self, identity: Any) -> Unread:
        kind, storage, key, _, _ = identity
        if kind != "storage" or not isinstance(storage, Unread):
            raise ValueError("it refers to something that isn't a tensor's storage")
        if storage.named not in _STORAGES:
            raise Refused(f"holds a tensor in a {storage.named}; save plain tensors with data")
        return Unread("memory of a tensor", (key, _STORAGES[storage.named]))

    def _tensor(
        self, memory: Any, offset: int, size: Any, stride: Any, grad: Any, hooks: Any, metadata: Any = None
    ) -> Tensor:
        key, dtype = memory.arguments
        return self._typed(key, dtype, offset, size, stride, metadata)

    def _tensor_of_bytes(
        self, memory: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
    ) -> Tensor:
        return self._typed(memory.arguments[0], dtype, offset, size, stride, metadata)

    def _typed(self, key: str, dtype: torch.dtype, offset: int, size: Any, stride: Any, metadata: Any) -> Tensor:
        size = sizes(size, "tensor's shape")
        if len(size) != len(stride) or not all(type(one) is int and 0 <= one < 1 << 62 for one in (offset, *stride)):
            raise ValueError("a tensor's strides aren't valid")
        if metadata:
            raise Refused("holds a tensor that is conjugated or negated by a flag alone; save its resolve_conj()")
        if not (count := math.prod(size)):
            return torch.empty(size, dtype=dtype)
        stored = self._stored(key, dtype)
        if count > stored.numel():
            raise Refused(f"holds a tensor of {count} numbers where {stored.numel()} are stored; save it contiguous")
        if offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) >= stored.numel():
            raise Refused(f"holds a tensor of the shape {tuple(size)}, of which not all is stored")
        return stored.as_strided(size, stride, offset)

    def _stored(self, key: str, dtype: torch.dtype) -> Tensor:
        if (key, dtype) not in self.memories:
            raw = self._bytes(f"data/{key}")
            stored = torch.frombuffer(raw, dtype=dtype, count=len(raw) // dtype.itemsize)
            # torch aligns what it writes, others may not.
            self.memories[key, dtype] = stored.clone() if stored.data_ptr() % dtype.itemsize else stored
        return self.memories[key, dtype]

    def _from_type(self, function: Any, kind: Any, arguments: Any, state: Any) -> Any:
        """A tensor of a subclass: what isn't known here is kept as a description."""
        if kind.named not in _PLAIN:
            return Unread(kind.named, arguments, state)
        return self.known[function.named](*arguments)

    def _paid(self, value: Any) -> Any:
        """Charge for a copy, of which a file may have no more than its size: references repeat it many times."""
        self.budget -= len(value)
        if self.budget < 0 or not isinstance(value, (str, bytes, list, tuple)):
            raise ValueError("it makes values larger than the file")
        return value

    def _encoded(self, text: Any, encoding: Any) -> bytes:
        if encoding != "latin1":
            raise ValueError(f"an encoding is {encoding!r}"[:60])
        raw: bytes = self._paid(text).encode("latin1")
        return raw

    def _paid_set(self, items: Any) -> set[Any]:
        if not all(isinstance(one, (str, int, float, bytes)) for one in self._paid(items)):
            raise ValueError("a set holds something that isn't a plain value")
        return set(items)


def _attribute(owner: Any, name: Any) -> Unread:
    if not (isinstance(owner, Unread) and owner.arguments is None and isinstance(name, str)):
        raise ValueError("it asks for an attribute of a value")
    return Unread(f"{owner.named}.{name}")


_PLAIN = ("torch.Tensor", "torch.nn.parameter.Parameter")
_KNOWN: dict[str, Make] = {
    "collections.OrderedDict": new_dict,
    "torch.Size": lambda numbers: sizes(numbers, "size"),
    "torch.device": lambda kind, index=None: torch.device(kind) if index is None else torch.device(kind, index),
    "torch._utils._rebuild_parameter": lambda tensor, *rest: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *rest: tensor,
    "builtins.complex": lambda real, imag: complex(float(real), float(imag)),
    "builtins.getattr": _attribute,
}

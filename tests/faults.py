"""File objects that stand in for the store's: one records, one lives in memory, one is what a power cut leaves.

The model of a file system is the weakest that POSIX allows: a file's content survives if it was synced, an entry
of a directory if the directory was. Of what wasn't, any part may be there, in any order: an entry without
content, content torn in the middle, a rename without what it names, an unlink before an earlier one.
"""

from __future__ import annotations

import io
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from fsdp2.checkpoint.files import Files, LocalFiles, inside

Op = tuple[Any, ...]


class MemoryFiles:
    """A tree of bytes: {"folder": {"file": b"…"}}. Only what reading needs."""

    put_is_atomic = False

    def __init__(self, tree: dict[str, Any], name: str = "") -> None:
        self.tree, self.name = tree, name

    def __str__(self) -> str:
        return self.name

    def _get(self, name: str) -> Any:
        node: Any = self.tree
        for part in filter(None, inside(name).split("/")):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    def at(self, name: str) -> Files:
        return cast(Files, MemoryFiles(self._get(name) or {}, f"{self.name}/{name}"))

    def open(self, name: str) -> BinaryIO:
        return io.BytesIO(self.read(name))

    def read(self, name: str) -> bytes:
        content = self._get(name)
        if not isinstance(content, bytes):
            raise FileNotFoundError(name)
        return content

    def size(self, name: str) -> int | None:
        content = self._get(name)
        return len(content) if isinstance(content, bytes) else None

    def list(self, name: str) -> list[str]:
        node = self._get(name)
        return sorted(node) if isinstance(node, dict) else []


def recording(log: list[tuple[float, Op]]) -> type[LocalFiles]:
    """`LocalFiles` that also notes each change, with its time and absolute path, in `log`."""

    def note(*op: Any) -> None:
        log.append((time.monotonic(), op))

    class Stream(io.RawIOBase):
        def __init__(self, path: str, file: BinaryIO) -> None:
            self.path, self.file = path, file

        def write(self, data: Any) -> int:
            note("data", self.path, bytes(data))
            return self.file.write(data)

        def close(self) -> None:
            self.file.close()
            super().close()

    class Recording(LocalFiles):
        def create(self, name: str) -> BinaryIO:
            file = super().create(name)
            note("create", str(self._path(name)))
            return cast(BinaryIO, Stream(str(self._path(name)), file))

        def write(self, name: str, content: bytes) -> None:
            super().write(name, content)
            note("create", str(self._path(name)))
            note("data", str(self._path(name)), content)

        def fsync(self, name: str) -> None:
            super().fsync(name)
            note("fsync", str(self._path(name)))

        def rename(self, source: str, target: str) -> None:
            super().rename(source, target)
            note("rename", str(self._path(source)), str(self._path(target)))

        def unlink(self, name: str) -> None:
            super().unlink(name)
            note("unlink", str(self._path(name)))

        def mkdir(self, name: str) -> None:
            if not self._path(name).exists():
                note("mkdir", str(self._path(name)))
            super().mkdir(name)

        def rmdir(self, name: str) -> None:
            super().rmdir(name)
            note("rmdir", str(self._path(name)))

    return Recording


@dataclass
class Node:
    """A file or directory: what is durable of it, and what was done to it since."""

    is_folder: bool
    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    entries: dict[str, Node] = field(default_factory=dict)
    durable_entries: dict[str, Node] = field(default_factory=dict)
    # Each pending change of entries: names to set (None = remove), which come and go together.
    pending: list[dict[str, Node | None]] = field(default_factory=list)


class PowerCut:
    """A file system after some operations, which may lose its power now."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.root = Node(is_folder=True)

    def _split(self, path: str) -> tuple[Node, str]:
        *folders, name = path.removeprefix(self.base).strip("/").split("/")
        node = self.root
        for part in folders:
            node = node.entries[part]
        return node, name

    def _find(self, path: str) -> Node:
        if path.rstrip("/") == self.base:
            return self.root
        folder, name = self._split(path)
        return folder.entries[name]

    def _change(self, folder: Node, change: dict[str, Node | None]) -> None:
        folder.pending.append(change)
        _apply(folder.entries, change)

    def do(self, op: Op) -> None:
        kind, path = op[0], op[1]
        if kind in ("create", "mkdir"):
            folder, name = self._split(path)
            self._change(folder, {name: Node(is_folder=kind == "mkdir")})
        elif kind == "data":
            self._find(path).content += op[2]
        elif kind == "fsync":
            node = self._find(path)
            node.durable, node.durable_entries = bytes(node.content), dict(node.entries)
            node.pending = []
        elif kind == "rename":
            folder, name = self._split(path)
            other, target = self._split(op[2])
            assert folder is other, "the protocol renames inside one folder"
            self._change(folder, {name: None, target: folder.entries[name]})
        elif kind in ("unlink", "rmdir"):
            folder, name = self._split(path)
            self._change(folder, {name: None})

    def _nodes(self, node: Node) -> Iterator[Node]:
        """All nodes that may be there after the cut."""
        yield node
        children = {
            id(c): c for c in itertools.chain(node.durable_entries.values(), *(p.values() for p in node.pending)) if c
        }
        for child in children.values():
            yield from self._nodes(child)

    def states(self, generator: random.Random) -> Iterator[dict[str, Any]]:
        """Trees that the cut may leave: nothing pending survived, all did, each alone, all but each, and mixtures."""
        units: list[tuple[int, int]] = []  # (node, index of a pending change; -1 = its content)
        for node in {id(n): n for n in self._nodes(self.root)}.values():
            units += [(id(node), i) for i in range(len(node.pending))]
            if not node.is_folder and bytes(node.content) != node.durable:
                units.append((id(node), -1))
        choices = [set(), set(units)]
        choices += [{unit} for unit in units] + [set(units) - {unit} for unit in units]
        choices += [{unit for unit in units if generator.random() < 0.5} for _ in range(6)]
        for kept in choices:
            yield self._tree(self.root, kept, None)
            if any(index == -1 for _, index in set(units) - kept):
                yield self._tree(self.root, kept, generator)

    def _tree(self, node: Node, kept: set[tuple[int, int]], torn: random.Random | None) -> Any:
        if not node.is_folder:
            if (id(node), -1) in kept or bytes(node.content) == node.durable:
                return bytes(node.content)
            return node.durable if torn is None else _torn(bytes(node.content), len(node.durable), torn)
        entries = dict(node.durable_entries)
        for index, change in enumerate(node.pending):
            if (id(node), index) in kept:
                _apply(entries, change)
        return {name: self._tree(child, kept, torn) for name, child in entries.items()}


def _apply(entries: dict[str, Node], change: dict[str, Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _torn(content: bytes, durable: int, generator: random.Random) -> bytes:
    """Some of what was written after the last sync: cut off, or with a hole of zeros."""
    start = generator.randint(durable, len(content))
    end = generator.randint(start, len(content))
    return generator.choice([content[:start], content[:start] + bytes(end - start) + content[end:]])

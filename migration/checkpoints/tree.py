"""The files of a checkpoint as one tree of tensors and plain values that are read one at a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fsdp2.checkpoint.metadata import TreePath
from fsdp2.checkpoint.pickles import Unread
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.source import Source, dotted


@dataclass(frozen=True)
class Entry:
    """One tensor or plain value.

    Attributes:
        meta: a tensor on `meta` with the shape and dtype; None of a plain value.
        read: the whole tensor on the CPU, or the value.
        where: the file and the name in it, for messages.
        dcp: the DCP directory and the name in it, if it is in one.
    """

    meta: Tensor | None
    read: Callable[[], Any]
    where: str
    dcp: tuple[str, str] | None = None


Tree = Mapping[TreePath, Entry]


def tree_of(source: Source) -> dict[TreePath, Entry]:
    """All of an opened file or directory. Parameter groups that were saved as one value are taken apart."""
    place = source.place.rsplit("/", 1)[-1]
    tree = {}
    for name, path in _paths(source).items():
        dcp = (str(source.folder), name) if source.folder is not None and source.file is None else None
        entry = Entry(source.tensors.get(name), partial(source.read, name), f"{place}: {name}", dcp)
        if entry.meta is None and path[-1] == "param_groups":
            tree.update({(*path, *rest): one for rest, one in _groups(entry)})
        else:
            tree[path] = entry
    return tree


# Of an optimizer's names in a state dict that wasn't nested, and so has no paths.
_FLAT_STATE = re.compile(r"(\w+)\.state\.(.+)\.(\w+)")
_FLAT_GROUPS = re.compile(r"(\w+)\.param_groups")


def _paths(source: Source) -> Mapping[str, TreePath]:
    """The paths of a source; found out from the names if the state dict that was saved was flat, optimizer and all."""
    states = {name: match for name in source.paths if (match := _FLAT_STATE.fullmatch(name))}
    groups = {name: match for name in source.paths if (match := _FLAT_GROUPS.fullmatch(name))}
    if not states or not groups or any(len(path) > 1 for path in source.paths.values()):
        return source.paths
    found: dict[str, TreePath] = {name: tuple(name.split(".", 1)) for name in source.paths}
    found |= {name: (match[1], "state", match[2], match[3]) for name, match in states.items()}
    return found | {name: (match[1], "param_groups") for name, match in groups.items()}


def _groups(entry: Entry) -> Iterator[tuple[TreePath, Entry]]:
    """Before torch 2.4, DCP saved a list as one value."""
    groups = entry.read()
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise Refused(f"{entry.where} is no list of parameter groups")
    for index, group in enumerate(groups):
        for key, value in group.items():
            is_tensor = isinstance(value, Tensor)
            meta = value.to("meta") if is_tensor else None
            yield (index, str(key)), Entry(meta, partial(_same, value), f"{entry.where}.{index}.{key}")


def _same(value: Any) -> Any:
    return value


def below(tree: Tree, prefix: TreePath) -> dict[TreePath, Entry]:
    """The part of a tree under a prefix, with the paths that are left."""
    return {path[len(prefix) :]: entry for path, entry in tree.items() if path[: len(prefix)] == prefix}


def value_of(entry: Entry) -> Any:
    """A plain value. Raises Refused for an object that was not read."""
    value = entry.read()
    if unread := next(_unread(value), None):
        raise Refused(f"{entry.where} is {unread!r}, which is not read; save it as a number, text, or a tensor")
    return value


def _unread(value: Any) -> Iterator[Unread]:
    if isinstance(value, Unread):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _unread(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _unread(one)


def is_shard(entry: Entry) -> bool:
    """True if it is one rank's part of a tensor: a ShardedTensor or a DTensor, which is read without its group."""
    value = None if entry.meta is not None or entry.dcp is not None else entry.read()
    return isinstance(value, Unread) and value.named.endswith(("ShardedTensor", "DTensor"))


def is_odd_tensor(entry: Entry) -> bool:
    """True if it is a tensor that isn't read: sparse, nested, or on `meta`."""
    value = entry.read() if entry.meta is None and entry.dcp is None else None
    return isinstance(value, Unread) and value.named.startswith("torch._utils._rebuild_")


def parts(tree: Tree) -> dict[str, int]:
    """Name of each part of a tree -> how many entries it has."""
    return Counter(dotted(path[:2] if path[0] in ("app", "state") else path[:1]) for path in tree)

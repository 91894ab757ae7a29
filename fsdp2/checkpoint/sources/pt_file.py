"""State dicts as torch.save writes them, read and written without holding them in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp2.checkpoint.archive import forget, mapped, parse_archive
from fsdp2.checkpoint.metadata import TreePath
from fsdp2.checkpoint.pickles import Unread
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.source import Source, dotted
from fsdp2.checkpoint.spool import spool


class NoStateDict(Refused):
    """A file of torch.save that holds something else."""


def open_pt(place: str, path: Path, *, objects: bool = False) -> Source:
    """Open a flat or nested state dict, its tensors mapped from the file. Raises Refused or OSError.

    Args:
        objects: whether it may hold objects of unknown classes, which become `Unread`; else they are refused.
    """
    try:
        memory = mapped(path)
        tree = parse_archive(memoryview(memory), objects=objects)
    except Refused as error:
        raise Refused(f"{place}: can't be loaded: it {error}") from None
    if not isinstance(tree, Mapping):
        kind = tree.named if isinstance(tree, Unread) else type(tree).__name__
        raise NoStateDict(f"{place}: holds a {kind} and no state dict")
    leaves = dict(_leaves(tree))
    names = {dotted(path): path for path in leaves}
    if len(names) < len(leaves):
        raise Refused(f"{place}: has the same name twice, written in two ways")
    tensors = {name: leaves[path] for name, path in names.items() if isinstance(leaves[path], Tensor)}

    def part(name: str, ranges: tuple[slice, ...]) -> Tensor:
        forget(memory)  # what was read before
        return tensors[name][ranges]

    return Source(
        place,
        {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()},
        [name for name in names if name not in tensors],
        names,
        lambda name: leaves[names[name]],
        part=part,
    )


def _leaves(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    """Tensors and plain values of nested dicts, and of lists that hold such, with their paths."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(tree, (list, tuple)) and any(isinstance(one, (Mapping, list, tuple, Tensor)) for one in tree):
        for index, value in enumerate(tree):
            yield from _leaves(value, (*path, index))
    else:
        yield path, tree


def write_pt(
    path: Path,
    tensors: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    arrange: Callable[[dict[str, Tensor]], Any] = lambda state: state,
) -> None:
    """torch.save of a flat dict, by way of a temporary file beside it that takes as much space again.

    Args:
        tensors: name -> tensor on `meta`.
        read: name -> that tensor on the CPU, contiguous.
        arrange: makes what is saved of that dict, where it is to be nested.
    """
    with open(path, "wb") as target:
        torch.save(arrange(spool(tensors, read, path.parent)), target)

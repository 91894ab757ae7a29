"""State dicts as torch.save writes them, read and written without holding them in memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.source import Refused, Source, TreePath, dotted, one_line
from fsdp2.checkpoint.spool import spool


class NoStateDict(Refused):
    """A file of torch.save that holds something else."""


def _load(path: Path) -> Any:
    return torch.load(path, mmap=True, weights_only=True, map_location="cpu")


def open_pt(place: str, path: Path, load: Callable[[Path], Any] = _load) -> Source:
    """Open a flat or nested state dict, its tensors mapped from the file. Raises Refused.

    Args:
        load: another way to read the file that runs no code from it either.
    """
    try:
        tree = load(path)
        leaves = dict(_leaves(tree))
    except Refused:
        raise
    except Exception as error:  # torch.load fails in many ways on what isn't its own
        if isinstance(error, OSError) and error.filename is not None:
            raise  # the file itself can't be read; else torch has read nonsense and seeks to where nothing is
        if isinstance(error, pickle.UnpicklingError) and load is _load:
            raise Refused(f"{place}: holds more than tensors and plain values, so weights_only refuses it") from None
        fix = "; a file in the format of before torch 1.6 has to be saved again" if "mmap" in str(error) else ""
        raise Refused(f"{place}: can't be loaded ({one_line(error)}){fix}") from None
    if not isinstance(tree, Mapping):
        raise NoStateDict(f"{place}: holds a {getattr(tree, 'named', type(tree).__name__)} and no state dict")
    names = {dotted(path): path for path in leaves}
    if len(names) < len(leaves):
        raise Refused(f"{place}: has the same name twice, written in two ways")
    tensors = {name: leaves[path] for name, path in names.items() if isinstance(leaves[path], Tensor)}
    for name, tensor in tensors.items():
        if problem := _unusable(tensor):
            raise Refused(f"{place}: {name} {problem}")
    return Source(
        place,
        {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()},
        [name for name in names if name not in tensors],
        names,
        lambda name: leaves[names[name]],
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
        yield path, tree.detach() if isinstance(tree, Tensor) else tree


def _unusable(tensor: Tensor) -> str | None:
    if type(tensor) is not Tensor:
        return f"is a {type(tensor).__name__}; save plain tensors, such as a DTensor's full_tensor()"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        return f"is {tensor.layout}, {tensor.dtype} on {tensor.device}; save plain tensors with data"
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        return f"says {tensor.nbytes} bytes where {tensor.untyped_storage().nbytes()} are stored; save it contiguous"
    return None


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
        arrange: makes what is saved of that dict, where it shall be nested.
    """
    with LocalFiles(path.parent).create(path.name) as target:
        torch.save(arrange(spool(tensors, read, path.parent)), target)

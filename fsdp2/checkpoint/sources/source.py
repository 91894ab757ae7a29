"""Tensors by name, read one at a time: what a checkpoint, a .pt file and safetensors have in common."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp2.checkpoint.disk import temporary_folder
from fsdp2.checkpoint.files import Files, LocalFiles, inside
from fsdp2.checkpoint.metadata import TreePath
from fsdp2.checkpoint.refusal import Refused


@dataclass
class Source:
    """An opened place with tensors.

    Attributes:
        tensors: name -> tensor on `meta`, with the shape and dtype. Names in a nested state dict are joined by dots.
        values: names of what isn't a tensor.
        paths: name -> its place in the nested state dict.
        read: name -> the whole tensor on the CPU, which may be a file's mapped memory, or the plain value.
        folder: where a marker may vouch for it: a DCP directory, or the folder of `file`.
        value_files: names of the files in `folder` that plain values are read from.
        part: (name, range of each dimension) -> that part, where it can be read alone.
    """

    place: str
    tensors: Mapping[str, Tensor]
    values: Sequence[str]
    paths: Mapping[str, TreePath]
    read: Callable[[str], Any]
    folder: Files | None = None
    file: str | None = None
    value_files: Sequence[str] = ()
    part: Callable[[str, tuple[slice, ...]], Tensor] | None = None

    def read_part(self, name: str, place: tuple[slice, ...]) -> Tensor:
        """A range of each dimension of a tensor, in memory that is free again when the next one is read."""
        if self.part is not None:
            return self.part(name, place)
        whole: Tensor = self.read(name)
        return whole[place] if place else whole


def dotted(path: TreePath) -> str:
    """The path of a value in a tree, with dots between its parts."""
    return ".".join(map(str, path))


def part_of(path: TreePath) -> str:
    """The part of a state dict that something belongs to: app.optim, or model."""
    return dotted(path[: 2 if path[0] == "app" else 1])


def weights_prefix(source: Source) -> TreePath:
    """The keys of the model: ("app", "model"), ("model",), or () if it isn't told from anything else."""
    for prefix in (("app", "model"), ("model",)):
        if any(path[: len(prefix)] == prefix and len(path) > len(prefix) for path in source.paths.values()):
            return prefix
    return ()


def weights(source: Source) -> dict[str, str]:
    """Plain name -> name in the source, of each tensor of the model. Raises Refused if they can't be told."""
    prefix = weights_prefix(source)
    others = sorted({str(path[0]) for path in source.paths.values() if len(path) > 1})
    if not prefix and others:
        raise Refused(
            f"{source.place}: holds {', '.join(others[:5])}, and no model or app.model among them; it "
            "isn't clear which are the weights"
        )
    found = {
        dotted(source.paths[name][len(prefix) :]): name
        for name in source.tensors
        if source.paths[name][: len(prefix)] == prefix
    }
    if not found:
        raise Refused(f"{source.place}: holds no weights of a model")
    return found


def averaged(source: Source) -> Source:
    """The same source with the average of each weight that has one in its place. Raises Refused if none has."""
    averages = {path[2:]: name for name, path in source.paths.items() if path[:2] == ("app", "ema")}
    if not averages:
        raise Refused(f"{source.place}: holds no average of the weights, which runs with --ema keep; drop --ema")
    prefix = weights_prefix(source)
    instead = {
        name: averages[path[len(prefix) :]]
        for name, path in source.paths.items()
        if path[: len(prefix)] == prefix and path[len(prefix) :] in averages
    }
    return replace(source, read=lambda name: source.read(instead.get(name, name)), part=None)


def local_copy(folder: Files, name: str, stack: ExitStack) -> Path:
    """The path of a file to map; one at a URL is copied to a disk until the stack is left. Raises NotAFile."""
    if isinstance(folder, LocalFiles):
        folder.open(name).close()
        return folder.root / inside(name)
    copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdp2-", dir=temporary_folder()))) / "file"
    with folder.open(name) as source, open(copy, "xb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return copy


def comparable(block: Tensor) -> Tensor:
    """Torch compares no floating point types of 8 bits, nor two of 4 bits in a byte, which become a complex number."""
    if block.dtype == torch.float4_e2m1fn_x2:
        pair, values = block.view(torch.uint8).int(), torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        return torch.complex(*(torch.cat([values, -values])[half] for half in (pair & 15, pair >> 4)))
    return block.float() if block.is_floating_point() and block.itemsize == 1 else block

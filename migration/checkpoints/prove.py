"""The proof that a conversion changed nothing: every tensor and setting of both sides, read again and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fsdp2.checkpoint.metadata import TreePath
from fsdp2.checkpoint.sources.source import dotted
from fsdp2.checkpoint.spool import raw_bytes
from fsdp2.checkpoint.store import HASH, new_hash
from migration.checkpoints.tree import Entry, Tree, value_of


class Differs(RuntimeError):
    """The checkpoint that was written differs from the one that was read. The message lists names."""


@dataclass
class Proof:
    """The outcome of a comparison.

    Attributes:
        tensors: tensors of the model.
        elements: numbers in them.
        optimizer: tensors of the optimizer.
        settings: of its parameter groups.
        digest: of all names, dtypes, shapes and bytes, the same before and after.
        differences: lines; none if it is proven.
    """

    tensors: int = 0
    elements: int = 0
    optimizer: int = 0
    settings: int = 0
    digest: str = ""
    differences: list[str] = field(default_factory=list)

    def line(self) -> str:
        what = f"{self.tensors} tensors of the model ({self.elements:,} values)"
        if self.optimizer or self.settings:
            what += f", {self.optimizer} of the optimizer and {self.settings} settings"
        return f"{what} are bit-equal before and after, {HASH} {self.digest[:16]}"


def compare(before: Tree, after: Mapping[str, Any], read: Callable[[str], Any]) -> Proof:
    """Read both sides, one tensor at a time.

    Args:
        before: what was to be written, from the source, opened again.
        after: names in the result -> anything; each must be one of `before`, and the other way round.
        read: name -> tensor or value of the result.

    Raises Differs.
    """
    proof, sides = Proof(), (new_hash(), new_hash())
    names = {dotted(path): path for path in before}
    proof.differences += [f"{name} is missing in the result" for name in sorted(names.keys() - after.keys())]
    proof.differences += [f"{name} is in the result alone" for name in sorted(after.keys() - names.keys())]
    for name in sorted(names.keys() & after.keys()):
        path, entry = names[name], before[names[name]]
        if entry.meta is None:
            one, other = value_of(entry), read(name)
            equal = type(one) is type(other) and repr(one) == repr(other)
        else:
            hashes = [hash_of(entry.read()), hash_of(read(name))]  # one after the other: one is in memory
            for side, digest in zip(sides, hashes, strict=True):
                side.update(f"{name}\n{digest}\n".encode())
            equal = hashes[0] == hashes[1]
        if not equal:
            proof.differences.append(f"{name} differs")
        _count(proof, path, entry.meta)
    if proof.differences:
        raise Differs(summary(proof.differences))
    assert sides[0].hexdigest() == sides[1].hexdigest()
    proof.digest = sides[0].hexdigest()
    return proof


def _count(proof: Proof, path: TreePath, meta: Tensor | None) -> None:
    if meta is None:
        proof.settings += 1
    elif "model" in path[:2]:
        proof.tensors += 1
        proof.elements += meta.numel()
    else:
        proof.optimizer += 1


def content(entry: Entry) -> str:
    """Text that only an entry of the same content has."""
    return repr(value_of(entry)) if entry.meta is None else hash_of(entry.read())


def hash_of(tensor: Tensor) -> str:
    """Of dtype, shape and bytes."""
    tensor = tensor.contiguous()
    return f"{tensor.dtype} {list(tensor.shape)} {new_hash(raw_bytes(tensor)).hexdigest()}"


def summary(lines: Iterable[str]) -> str:
    """The first few of many."""
    lines = list(lines)
    return "; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" if len(lines) > 5 else "")

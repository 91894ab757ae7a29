"""The weights of a file or folder into a model: each rank reads what it keeps, and no more than that.

A full-model.pt, safetensors, a folder of Hugging Face's, a sharded checkpoint: whatever `sources.opening` opens. What a
rank needs of it beside its shard is its rows of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint.full_file import differences
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.opening import opened, require_without_adapters
from fsdp2.checkpoint.sources.source import Source, comparable, weights
from fsdp2.checkpoint.store import DamagedCheckpoint
from fsdp2.checkpoint.together import raised_on_all

Slices = Callable[[Tensor], tuple[slice, ...]]


class OtherWeights(Refused):
    """Weights that aren't those of the model."""


@dataclass(frozen=True)
class Fitting:
    """The weights of a place that fit a model.

    Attributes:
        names: name in the model -> name in the place.
        left_out: a line for each tensor of either side that isn't among them.
    """

    names: Mapping[str, str]
    left_out: Sequence[str]


def check_weights(
    place: str, targets: Mapping[str, Tensor], tied: Sequence[Sequence[str]], *, partial: bool = False
) -> None:
    """Raises Refused or OSError if a place can't be read, and OtherWeights if it isn't of this model.

    Args:
        partial: that one tensor fits is enough.
    """
    with opened(place) as source:
        require_without_adapters(source)
        _fitting(source, targets, tied, partial=partial)


def _fitting(source: Source, targets: Mapping[str, Tensor], tied: Sequence[Sequence[str]], *, partial: bool) -> Fitting:
    """Raises OtherWeights."""
    names = weights(source)
    for group in tied:  # of the names that a weight has, a file may hold one alone
        if known := [name for name in group if name in names]:
            names |= {name: names[known[0]] for name in group if name not in names}
    found = differences({name: source.tensors[original] for name, original in names.items()}, targets)
    fitting = {name: names[name] for name in targets if name not in found}
    if found and not (partial and fitting):
        lines = list(found.values())
        more = f"; and {len(lines) - 20} more" if len(lines) > 20 else ""
        which = "none fits" if partial else f"{len(lines)} tensors differ"
        raise OtherWeights(f"{source.place} is of another model; {which}: {'; '.join(lines[:20])}{more}")
    return Fitting(fitting, list(found.values()))


def load_weights(
    place: str,
    targets: Mapping[str, Tensor],
    slices_of: Slices,
    tied: Sequence[Sequence[str]] = (),
    *,
    partial: bool = False,
) -> Fitting:
    """Fill tensors, sharded or plain, from a place. A collective call.

    Args:
        targets: name -> tensor; a floating dtype may be another one than the file's.
        slices_of: which range of each dimension of a whole tensor this rank holds.
        tied: names of one weight.
        partial: leave out what doesn't fit.

    Returns what was loaded and what was left out. Raises OtherWeights on every rank if names, shapes or kinds of
    numbers differ, and Refused if a rank can't read the place, or if that has several weights where the model has one.
    """

    def refused(error: Exception) -> Refused:
        return error if isinstance(error, OtherWeights) else Refused(str(error))

    with raised_on_all(Refused, DamagedCheckpoint, OSError, as_=refused), opened(place) as source:
        require_without_adapters(source)
        return fill(source, targets, slices_of, tied, partial=partial)


@torch.no_grad()
def fill(
    source: Source, targets: Mapping[str, Tensor], slices_of: Slices, tied: Sequence[Sequence[str]], *, partial: bool
) -> Fitting:
    """Do as `load_weights` from what is open, without the other ranks. Raises OtherWeights, Refused or OSError."""
    fitting = _fitting(source, targets, tied, partial=partial)
    for group in tied:
        _require_one(source, fitting, [name for name in group if name in fitting.names], targets, slices_of)
    for name, original in fitting.names.items():
        target = targets[name]
        local = target.to_local() if isinstance(target, DTensor) else target
        local.copy_(source.read_part(original, slices_of(target)))
    return fitting


def _require_one(
    source: Source, fitting: Fitting, names: Sequence[str], targets: Mapping[str, Tensor], slices_of: Slices
) -> None:
    """Raise Refused if a source holds different weights under the names of one."""
    if len({fitting.names[name] for name in names}) < 2:
        return
    parts = [comparable(source.read_part(fitting.names[name], slices_of(targets[name]))) for name in names]
    if not all(torch.equal(part, parts[0]) for part in parts):
        raise Refused(
            f"{source.place} is of another model; {', '.join(names)} are one weight in the model and differ in the "
            "file; untie them in its configuration, or leave one out of the file"
        )

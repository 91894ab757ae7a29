"""The weights of a file or folder into a model: each rank reads what it keeps, and no more than that.

A full-model.pt, safetensors, a folder of Hugging Face's, a sharded checkpoint: whatever `convert.opening` opens. What a
rank needs of it beside its shard is one tensor's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2.checkpoint.convert.opening import opened
from fsdp2.checkpoint.convert.source import Source, weights
from fsdp2.checkpoint.full_file import differences
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.store import DamagedCheckpoint

Place = Callable[[Tensor], tuple[slice, ...]]


class OtherWeights(Refused):
    """Weights that aren't those of the model."""


def check_weights(place: str, targets: Mapping[str, Tensor], tied: Sequence[Sequence[str]]) -> None:
    """Raises Refused or OSError if a place can't be read, and OtherWeights if it isn't of this model."""
    with opened(place) as source:
        names = _names(source, tied)
        _require_same(place, {name: source.tensors[original] for name, original in names.items()}, targets)


def _names(source: Source, tied: Sequence[Sequence[str]]) -> dict[str, str]:
    """Name in the model -> name in the source. Of the names that a weight has, a file may hold one alone."""
    found = weights(source)
    for names in tied:
        if known := [name for name in names if name in found]:
            found |= {name: found[known[0]] for name in names if name not in found}
    return found


def _require_same(place: str, there: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    if lines := differences(there, targets):
        more = f"; and {len(lines) - 20} more" if len(lines) > 20 else ""
        raise OtherWeights(f"{place} is of another model; {len(lines)} tensors differ: {'; '.join(lines[:20])}{more}")


@torch.no_grad()
def load_weights(
    place: str, targets: Mapping[str, Tensor], place_of: Place, tied: Sequence[Sequence[str]] = (), *, partial: bool
) -> list[str]:
    """Fill tensors, sharded or plain, from a place. A collective call.

    Args:
        targets: name -> tensor; a floating dtype may be another one than the file's.
        place_of: which range of each dimension of a whole tensor this rank holds.
        tied: names of one weight.
        partial: leave out what doesn't fit.

    Returns a line for each tensor of either side that was left out. Raises OtherWeights on every rank if names, shapes
    or kinds of numbers differ, and Refused if a rank can't read the place.
    """
    left_out: list[str] = []
    problem: tuple[type[Refused], str] | None = None
    try:
        with opened(place) as source:
            names = _names(source, tied)
            there = {name: source.tensors[original] for name, original in names.items()}
            if partial:
                left_out = differences(there, targets)
                ours = {line.split(":")[0] for line in left_out}
                targets = {name: target for name, target in targets.items() if name not in ours}
            else:
                _require_same(place, there, targets)
            for name, target in targets.items():
                local = target.to_local() if isinstance(target, DTensor) else target
                local.copy_(source.read_part(names[name], place_of(target)))
    except OtherWeights as error:
        problem = OtherWeights, str(error)
    except (Refused, DamagedCheckpoint, OSError) as error:
        problem = Refused, str(error)
    problems: list[tuple[type[Refused], str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for found in problems:
        if found is not None:
            raise found[0](found[1])
    return left_out

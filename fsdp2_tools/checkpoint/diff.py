"""`diff`: how two checkpoints or files of weights differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp2.checkpoint.sources.opening import VERIFIED, opened, verified
from fsdp2.checkpoint.sources.source import Source, comparable, weights, weights_prefix
from fsdp2.units import printable
from fsdp2_tools.checkpoint.show import short_repr

# Compared so many elements at a time, so that a difference takes no memory of a tensor's size.
_BLOCK = 1 << 20
# A place in the run's own metrics.jsonl, whose lines hold times: it differs between two runs that are equal.
_OF_ONE_RUN = {"app.progress.metrics_position"}


def diff(a: str, b: str) -> int:
    """Print how two places differ; 0 if they are equal, 1 if not.

    Both are compared with the hashes in their markers first.

    Two of a kind are compared whole, but for where each run's metrics.jsonl ends; a checkpoint and a file of weights by
    their weights' plain names.
    """
    with opened(a) as first, opened(b) as second:
        answers = {a: verified(first), b: verified(second)}
        if weights_prefix(first) == weights_prefix(second):
            ours, theirs = ({name: name for name in source.tensors} for source in (first, second))
            what, values = "", sorted(({*first.values} | {*second.values}) - _OF_ONE_RUN)
        else:
            ours, theirs = weights(first), weights(second)
            what, values = "model weights: ", []
        lines = [f"only in {a}: {name}" for name in ours if name not in theirs]
        lines += [f"only in {b}: {name}" for name in theirs if name not in ours]
        both = [name for name in ours if name in theirs]
        equal = 0
        for name in both:
            x, y = first.tensors[ours[name]], second.tensors[theirs[name]]
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                lines.append(f"{name}: {_type(x)} and {_type(y)}")
                continue
            count, largest = difference(first.read(ours[name]), second.read(theirs[name]))
            if count:
                lines.append(f"{name}: {count} of {x.numel()} values differ, by at most {largest:g}")
            equal += not count
        lines += [line for name in values if (line := _value_line(name, (a, first), (b, second)))]
    for line in lines:
        print(printable(line))
    print(
        f"{what}{equal} of {len(ours.keys() | theirs.keys())} tensors are equal"
        + (f"; {len(lines)} differences" if lines else "")
        + "".join(f"; {printable(place)} is {answer}" for place, answer in answers.items() if answer != VERIFIED)
        + ("; both are verified" if set(answers.values()) == {VERIFIED} else "")
    )
    return 1 if lines else 0


def _value_line(name: str, *sides: tuple[str, Source]) -> str | None:
    for place, source in sides:
        if name not in source.values:
            return f"not in {place}: {name}"
    one, other = (source.read(name) for _, source in sides)
    return None if _same(one, other) else f"{name}: {short_repr(one)} and {short_repr(other)}"


def _same(a: Any, b: Any) -> bool:
    """True if two plain values are of one type and equal, and their parts are; a NaN equals a NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and not difference(a, b)[0]
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b or (a != a and b != b))


def difference(a: Tensor, b: Tensor) -> tuple[int, float]:
    """The number of values that differ between two tensors of one shape and dtype, and the largest difference.

    A NaN equals a NaN; between a NaN or an infinity and another value the difference is nan or inf.
    """
    count, largest = 0, 0.0
    for x, y in zip(a.reshape(-1).split(_BLOCK), b.reshape(-1).split(_BLOCK), strict=True):
        x, y = comparable(x), comparable(y)
        differs = (x != y) & ~((x != x) & (y != y))
        if found := int(differs.sum()):
            count += found
            wide = torch.complex128 if x.is_complex() else torch.float64
            gap = (x[differs].to(wide) - y[differs].to(wide)).abs().max().item()
            largest = gap if gap != gap or gap > largest else largest
    return count, largest


def _type(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

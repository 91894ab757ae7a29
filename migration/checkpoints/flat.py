"""Parameters out of flat parameters, where the model's code and what was wrapped are at hand.

FSDP1 lays a unit's parameters one after the other, in the order of its modules, into one flat tensor, which the ranks
share in equal parts. With `use_orig_params=True` each begins at a multiple of 16 bytes. The gaps, and what fills the
last part, hold one value. Source: `torch/distributed/fsdp/_flat_param.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp2.checkpoint.metadata import TreePath
from fsdp2.checkpoint.refusal import Refused
from migration.checkpoints import optimizer
from migration.checkpoints.code import Code
from migration.checkpoints.detect import Piece
from migration.checkpoints.names import stripped
from migration.checkpoints.prove import content
from migration.checkpoints.tree import Entry, Tree, value_of

FLAT = "_flat_param"
_ALIGNMENT = 16  # bytes
NOT_PROVEN = "it was wrapped differently, or is another model's; give all classes that were wrapped with --wrap"

IN_ORDER = (
    "the optimizer's numbers were taken in the order of model.parameters(), with which all sizes agree; "
    "for another order add --optimizer-names"
)

Named = list[tuple[str, torch.Size]]


@dataclass(frozen=True)
class Unit:
    """One flat parameter: `prefix` is the module's name with a dot, "" of the root."""

    prefix: str
    parameters: Named


def units_of(model: nn.Module, wrapped: Sequence[nn.Module]) -> list[Unit]:
    """The units in the order in which FSDP1 has their flat parameters: the root's before the others'."""
    inner = set(wrapped)
    seen: set[nn.Parameter] = set()
    units = []
    # FSDP1 wraps bottom up, but no module here is in another's list of parameters, so the order doesn't matter.
    for name, module in model.named_modules():
        if module is model or module in inner:
            prefix = f"{name}." if name else ""
            own: Named = []
            for parameter_name, parameter in _own(module, inner):
                if parameter not in seen:  # what is tied is held once
                    seen.add(parameter)
                    own.append((prefix + parameter_name, parameter.shape))
            if own:
                units.append(Unit(prefix, own))
    return units


def _own(module: nn.Module, inner: set[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Parameters of a module and those below it that are in no other unit."""
    found = list(module.named_parameters(recurse=False))
    for name, child in module.named_children():
        if child not in inner:
            found += [(f"{name}.{n}", p) for n, p in _own(child, inner)]
    return found


@dataclass(frozen=True)
class Recover:
    """Makes pieces with parameters' names of those with flat parameters. It can be sent to another process."""

    code: Code
    with_optimizer: bool = True

    def __call__(self, pieces: list[Piece]) -> list[Piece]:
        """Raises Refused for what can't be proven to be laid out as the code says."""
        model = self.code.on_meta()
        units = units_of(model, self.code.units(model))
        return [self._piece(piece, model, units) if piece.ranks is not None else piece for piece in pieces]

    def _piece(self, piece: Piece, model: nn.Module, units: list[Unit]) -> Piece:
        assert piece.ranks is not None
        tree = dict(piece.tree)
        flat = {path: path[-1] for path in tree if isinstance(path[-1], str) and path[-1].endswith(FLAT)}
        if flat:
            tree = _weights(tree, list(flat), model, units, len(piece.ranks.each))
        whole = tree
        for place in optimizer.find(tree) if self.with_optimizer else []:
            tree = _optimizer(tree, place, piece.ranks.each, model, units)
        notes = [IN_ORDER] if tree is not whole else []
        return Piece(piece.label, tree, checked=piece.checked, notes=notes)


# --- one flat tensor -------------------------------------------------------------------------------------------


def layout(unit: Unit, size: int, itemsize: int, ranks: int, where: str = "") -> list[int]:
    """The begin of each parameter of a unit in a flat tensor of that size. Raises Refused if none fits exactly."""
    if offsets := _offsets(unit, size, itemsize, ranks):
        return offsets
    numbers = sum(shape.numel() for _, shape in unit.parameters)
    raise Refused(
        f"{where or unit.prefix + FLAT} has {size} values, and the parameters below {unit.prefix or 'the root'} in the "
        f"code {numbers}: {NOT_PROVEN}"
    )


def _offsets(unit: Unit, size: int, itemsize: int, ranks: int) -> list[int]:
    for aligned in (1, _ALIGNMENT // itemsize):
        at, offsets = 0, []
        for _, shape in unit.parameters:
            at += -at % aligned
            offsets.append(at)
            at += shape.numel()
        if any(size == at + -at % shards for shards in range(1, ranks + 1) if ranks % shards == 0):
            return offsets
    return []


def _entries(unit: Unit, flat: Entry, ranks: int) -> dict[str, Entry]:
    """Name -> its part of a flat tensor. What lies between must be one value, which parameters are not."""
    assert flat.meta is not None
    if flat.meta.dim() != 1:
        raise Refused(f"{flat.where} has {flat.meta.dim()} dimensions and is not flat")
    offsets = layout(unit, flat.meta.numel(), flat.meta.itemsize, ranks, flat.where)
    spans = [(at, at + shape.numel()) for at, (_, shape) in zip(offsets, unit.parameters, strict=True)]
    between = torch.ones(flat.meta.numel(), dtype=torch.bool)
    for start, end in spans:
        between[start:end] = False
    if len(gaps := flat.read()[between]) and not bool((gaps == gaps[0]).all()):
        raise Refused(f"{flat.where}: what lies between the parameters is not padding; {NOT_PROVEN}")
    whole = _Kept(flat.read)
    return {
        name: Entry(
            torch.empty(shape, dtype=flat.meta.dtype, device="meta"),
            partial(_part, whole, start, end, shape),
            f"{flat.where}, {name}",
        )
        for (name, shape), (start, end) in zip(unit.parameters, spans, strict=True)
    }


def _part(whole: Callable[[], Tensor], start: int, end: int, shape: torch.Size) -> Tensor:
    return whole()[start:end].view(shape).clone()


class _Kept:
    """Reads a flat tensor once for all of its parameters; of all of them the last is in memory."""

    last: tuple[_Kept, Tensor] | None = None

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __call__(self) -> Tensor:
        if _Kept.last is None or _Kept.last[0] is not self:
            _Kept.last = None  # before the next is read
            _Kept.last = self, self._read()
        return _Kept.last[1]


# --- the model -------------------------------------------------------------------------------------------------


def _weights(
    tree: Mapping[TreePath, Entry], flat: Sequence[TreePath], model: nn.Module, units: list[Unit], ranks: int
) -> dict[TreePath, Entry]:
    prefix = flat[0][:-1]
    names = stripped(str(path[-1]) for path in flat)
    there = {names[str(path[-1])].removesuffix(FLAT): path for path in flat}
    ours = {unit.prefix: unit for unit in units}
    if there.keys() != ours.keys():
        differ = sorted(there.keys() ^ ours.keys())
        raise Refused(
            f"{tree[flat[0]].where}: flat parameters are below {_listed(there)}, and --wrap makes them below "
            f"{_listed(ours)}; {differ[0] or 'the root'} is one side's alone: {NOT_PROVEN}"
        )
    found = {path: entry for path, entry in tree.items() if path not in flat}
    whole: dict[str, Entry] = {}
    for start, path in there.items():
        whole |= _entries(ours[start], tree[path], ranks)
    # A flat parameter holds once what has several names in the model.
    named = list(model.named_parameters(remove_duplicate=False))
    held = {parameter: whole[name] for name, parameter in named if name in whole}
    return found | {(*prefix, name): held[parameter] for name, parameter in named}


def _listed(prefixes: Mapping[str, Any]) -> str:
    return ", ".join(prefix.removesuffix(".") or "the root" for prefix in sorted(prefixes)[:4])


# --- the optimizer -----------------------------------------------------------------------------------------------


def _optimizer(
    tree: dict[TreePath, Entry], place: TreePath, each: Sequence[Tree], model: nn.Module, units: list[Unit]
) -> dict[TreePath, Entry]:
    """The state of `optimizer.state_dict()` on all ranks, by name: of flat parameters, or of shards of others."""
    groups = sorted((p, e) for p, e in tree.items() if p[:-2] == (*place, "param_groups") and p[-1] == "params")
    members = [value_of(entry) for _, entry in groups]
    numbers = [number for group in members for number in group]
    if not all(isinstance(number, int) for number in numbers) or numbers != list(range(len(numbers))):
        return tree  # by names, or numbered otherwise: whoever reads it will say so
    named = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    if len(numbers) == len(units) and len(units) != len(named):
        made = [_of_unit(place, number, unit, each, flat=True) for number, unit in enumerate(units)]
        names = [[name for number in group for name, _ in units[number].parameters] for group in members]
    elif len(numbers) == len(named) and len(members) == 1:
        alone = [Unit(f"{one[0]}.", [one]) for one in named]
        made = [_of_unit(place, number, unit, each, flat=False) for number, unit in enumerate(alone)]
        names = [[named[number][0] for number in group] for group in members]
    else:
        raise Refused(
            f"{groups[0][1].where}: the optimizer numbers {len(numbers)} parameters in {len(members)} groups; the code "
            f"has {len(units)} units and {len(named)} parameters, and nothing shows which is which; "
            f"{optimizer.SAVE_AGAIN}"
        )
    state = (*place, "state")
    found = {path: entry for path, entry in tree.items() if path[: len(state)] != state}
    for one in made:
        found |= {(*state, name, kind): entry for (name, kind), entry in one.items()}
    for (path, entry), own in zip(groups, names, strict=True):
        found[path] = Entry(None, partial(list, own), entry.where)
    return found


def _states(place: TreePath, number: int, each: Sequence[Tree]) -> dict[str, list[Entry]]:
    """Kind of entry -> those of the ranks that have one, in their order."""
    kinds: dict[str, list[Entry]] = {}
    for tree in each:
        for path, entry in tree.items():
            if path[:-1] == (*place, "state", str(number)):
                kinds.setdefault(str(path[-1]), []).append(entry)
    return kinds


def _joined(entries: Sequence[Entry], offsets: Callable[..., list[int]]) -> Entry:
    metas = [entry.meta for entry in entries if entry.meta is not None]
    if len(metas) != len(entries) or any(meta.dim() != 1 or meta.dtype != metas[0].dtype for meta in metas):
        raise Refused(f"{entries[0].where}: the ranks' parts are not flat, or differ; {optimizer.SAVE_AGAIN}")
    for shards in (number for number in range(len(entries), 0, -1) if len(entries) % number == 0):
        fits = offsets(size=sum(meta.numel() for meta in metas[:shards]), itemsize=metas[0].itemsize)
        if not fits:
            continue
        if any(content(one) != content(entries[n % shards]) for n, one in enumerate(entries[shards:])):
            raise Refused(f"{entries[0].where}: HYBRID_SHARD's replicas differ; give the files of one replica's ranks")
        entries, metas = entries[:shards], metas[:shards]
        break
    meta = torch.empty(sum(meta.numel() for meta in metas), dtype=metas[0].dtype, device="meta")
    return Entry(meta, lambda: torch.cat([entry.read() for entry in entries]), f"{entries[0].where} of all ranks")


def _shared(entries: Sequence[Entry], names: Sequence[str], kind: str) -> dict[tuple[str, str], Entry]:
    """An entry without a shape, such as the step: the same on all ranks, and for each parameter its own."""
    if len(set(map(content, entries))) > 1:
        raise Refused(f"{entries[0].where} differs between the ranks; {optimizer.SAVE_AGAIN}")
    if (meta := entries[0].meta) is not None and meta.numel() > 1:
        raise Refused(f"{entries[0].where} has a shape, and it isn't known which; {optimizer.SAVE_AGAIN}")
    return {(name, kind): entries[0] for name in names}


def _of_unit(
    place: TreePath, number: int, unit: Unit, each: Sequence[Tree], *, flat: bool
) -> dict[tuple[str, str], Entry]:
    """Of a flat parameter, of which each rank has a part; or of one of its own, of which some ranks have none."""
    found: dict[tuple[str, str], Entry] = {}
    for kind, entries in _states(place, number, each).items():
        if kind not in optimizer.SHAPED:
            found |= _shared(entries, [name for name, _ in unit.parameters], kind)
            continue
        if flat and len(entries) != len(each):
            raise Refused(f"{entries[0].where} is missing on {len(each) - len(entries)} ranks; {optimizer.SAVE_AGAIN}")
        ranks = len(each) if flat else 1  # of the former the last part is filled up
        whole = _joined(entries, partial(_offsets, unit, ranks=ranks))
        found |= {(name, kind): entry for name, entry in _entries(unit, whole, ranks).items()}
    return found

"""An optimizer's state, by parameters' names: as it was saved, or found out from the numbers that torch gives them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fsdp2.checkpoint.metadata import TreePath
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.source import dotted
from migration.checkpoints.names import stripped
from migration.checkpoints.tree import Entry, Tree, below, value_of

# Entries of torch's optimizers that have the shape of their parameter.
SHAPED = {
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta", "grad_avg",
    "sum", "ax", "mu_product_buffer", "prev", "step_size",
}  # fmt: skip

MOST_STEPS = 1 << 53  # up to there a float counts
SAVE_AGAIN = (
    "save it again with `FSDP.optim_state_dict(model, optimizer)`, which gives names and whole tensors, or take the "
    "weights alone with --no-optimizer"
)


def find(tree: Tree) -> list[TreePath]:
    """The places of optimizers' state dicts: wherever there are parameter groups."""
    places = {path[: path.index("param_groups")] for path in tree if "param_groups" in path[:-1]}
    return sorted(places, key=dotted)


def by_name(
    tree: Tree, model: Mapping[str, Entry], *, parameters: Sequence[str] | None, order: Sequence[str] | None
) -> dict[TreePath, Entry]:
    """The optimizer at a place, with plain names: ("state", name, entry) and ("param_groups", i, setting).

    Args:
        model: plain name -> entry, in the order of the state dict.
        parameters: which of those are parameters, in the model's order, where that is known.
        order: the names in the optimizer's order, where they are given.

    Raises Refused if names can't be told with certainty, or it is another model's, or sharded.
    """
    groups: dict[int, dict[str, Entry]] = {}
    state: dict[str, dict[str, Entry]] = {}
    for path, entry in tree.items():
        if path[0] == "param_groups" and len(path) == 3 and re.fullmatch("[0-9]{1,9}", str(path[1])):
            groups.setdefault(int(path[1]), {})[str(path[2])] = entry
        elif path[0] == "state" and len(path) >= 3:
            state.setdefault(dotted(path[1:-1]), {})[str(path[-1])] = entry
        else:
            raise Refused(f"{entry.where} is not something that a torch optimizer has; {SAVE_AGAIN}")
    members = [_members(groups[index]) for index in sorted(groups)]
    names = _plain_names(state, members, model, parameters, order)
    found: dict[TreePath, Entry] = {}
    for key, entries in state.items():
        for name, entry in entries.items():
            found["state", names[key], name] = _as_torch_has_it(name, entry)
    for (index, group), keys in zip(sorted(groups.items()), members, strict=True):
        for name, entry in group.items():
            found["param_groups", index, name] = entry
        whose = [names[str(key)] for key in keys]
        found["param_groups", index, "params"] = Entry(None, partial(list, whose), f"{group['params'].where}")
    return found


def _members(group: Mapping[str, Entry]) -> list[Any]:
    members = value_of(group["params"]) if "params" in group else None
    if not isinstance(members, (list, tuple)) or not all(type(one) in (int, str) for one in members):
        where = next(iter(group.values())).where
        raise Refused(f"{where}: its parameter group names no parameters; {SAVE_AGAIN}")
    return list(members)


def _plain_names(
    state: Mapping[str, Mapping[str, Entry]],
    members: list[list[Any]],
    model: Mapping[str, Entry],
    parameters: Sequence[str] | None,
    order: Sequence[str] | None,
) -> dict[str, str]:
    keys = [str(key) for group in members for key in group]
    if len(set(keys)) < len(keys):
        raise Refused(f"the optimizer has {Counter(keys).most_common(1)[0][0]} in two places; {SAVE_AGAIN}")
    if extra := sorted(state.keys() - set(keys)):
        raise Refused(f"the optimizer has state of {extra[0]}, which is in no parameter group; {SAVE_AGAIN}")
    if flat := [key for key in keys if "_flat_param" in key]:
        raise Refused(f"the optimizer's state is of flat parameters, such as {flat[0]}; {SAVE_AGAIN}")
    if all(isinstance(key, str) for group in members for key in group):
        names = stripped(keys)
        if strange := [name for name in names.values() if name not in model]:
            raise Refused(
                f"the optimizer is another model's: {len(strange)} of its {len(names)} parameters, such as "
                f"{strange[0]}, are not in the model; give the one that was saved with it, or --no-optimizer"
            )
    else:
        names = _names_of_numbers(state, members, model, parameters, order)
    for key, entries in state.items():
        for kind, entry in entries.items():
            ours = _shape(model[names[key]])
            if kind in SHAPED and entry.meta is not None and not _computes(entry):
                raise Refused(f"{entry.where} is {entry.meta.dtype}, with which no optimizer computes; {SAVE_AGAIN}")
            if kind in SHAPED and _shape(entry) != ours:
                raise Refused(f"{entry.where} has the shape {_shape(entry)}, and {names[key]} {ours}: {_why(entry)}")
    return names


def _why(entry: Entry) -> str:
    if len(_shape(entry)) == 1:
        return f"it is a shard of one rank, or another model's; {SAVE_AGAIN}"
    return "the optimizer is another model's; give the one that was saved with it, or --no-optimizer"


def _shape(entry: Entry) -> tuple[int, ...]:
    return tuple(entry.meta.shape) if entry.meta is not None else ()


def _as_torch_has_it(name: str, entry: Entry) -> Entry:
    """Before torch 1.12 an optimizer counted its steps in plain numbers, and others count in integers."""
    if name != "step" or (entry.meta is not None and (entry.meta.dtype, entry.meta.dim()) == (torch.float32, 0)):
        return entry
    return Entry(torch.empty((), device="meta"), lambda: torch.tensor(float(steps_of(entry))), entry.where)


def steps_of(entry: Entry) -> int:
    """The steps that an entry counts, a number or a tensor. Raises Refused if it is no whole number from 0 up."""
    value = value_of(entry)
    value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if type(value) not in (int, float) or not 0 <= value < MOST_STEPS or value != int(value):
        raise Refused(f"{entry.where} is {repr(value)[:60]} and no number of steps")
    return int(value)


# --- numbers instead of names ----------------------------------------------------------------------------


def may_be_parameters(model: Mapping[str, Entry]) -> list[str]:
    """Names of a model's tensors without those that can't be parameters: integers, and what batch norms count."""
    counted = {name.removesuffix(".num_batches_tracked") for name in model if name.endswith(".num_batches_tracked")}
    buffers = {f"{norm}.{kind}" for norm in counted for kind in ("running_mean", "running_var")}
    return [name for name, entry in model.items() if name not in buffers and _computes(entry)]


def _computes(entry: Entry) -> bool:
    return entry.meta is not None and (entry.meta.is_floating_point() or entry.meta.is_complex())


def _names_of_numbers(
    state: Mapping[str, Mapping[str, Entry]],
    members: list[list[Any]],
    model: Mapping[str, Entry],
    parameters: Sequence[str] | None,
    order: Sequence[str] | None,
) -> dict[str, str]:
    """Number -> name. Torch numbers an optimizer's parameters in its order, which is the model's if it was made of
    `model.parameters()`. Raises Refused unless shapes and counts leave a single possibility."""
    numbers = [key for group in members for key in group]
    if set(numbers) != set(range(len(numbers))):  # some may be names
        raise Refused(f"the optimizer's parameters are not numbered from 0 on; {SAVE_AGAIN}")
    shapes: list[tuple[int, ...] | None] = [
        next((_shape(e) for kind, e in state.get(str(n), {}).items() if kind in SHAPED), None) for n in numbers
    ]
    if order is not None:
        if not len(order) == len(set(order)) == len(numbers) or set(order) - model.keys():
            strange = sorted(set(order) - model.keys())
            what = f"{strange[0]} is not in the model" if strange else f"has {len(set(order))} names for {len(numbers)}"
            raise Refused(f"--optimizer-names: {what}; list the optimizer's parameters in its order")
        return {str(number): name for number, name in zip(numbers, order, strict=True)}
    candidates = list(parameters) if parameters is not None else may_be_parameters(model)
    theirs = [_shape(model[name]) for name in candidates]
    in_order = numbers == sorted(numbers)
    if len(members) > 1 and in_order:
        return _by_groups(members, shapes, candidates, theirs)
    # One group; or several whose numbers are mixed, which are then those of the model and not of the optimizer.
    by_number = [shape for _, shape in sorted(zip(numbers, shapes, strict=True), key=lambda pair: pair[0])]
    found = _single(by_number, theirs)
    return {str(number): candidates[index] for number, index in enumerate(found)}


def _by_groups(
    members: list[list[Any]], shapes: list[tuple[int, ...] | None], candidates: list[str], theirs: list[tuple[int, ...]]
) -> dict[str, str]:
    """Several groups, numbered one after the other: which parameters are in which must follow from their shapes."""
    split, at = [], 0
    for group in members:
        split.append(shapes[at : at + len(group)])
        at += len(group)
    kinds = [set(group) for group in split]
    if any(None in kind for kind in kinds) or sum(map(len, kinds)) > len(set[Any]().union(*kinds)):
        raise Refused(
            f"the optimizer numbers its parameters over {len(members)} groups that share shapes, and nothing shows "
            "which is which; list their names in its order in a JSON file with --optimizer-names, or " + SAVE_AGAIN
        )
    names = {}
    for group, wanted, kind in zip(members, split, kinds, strict=True):
        own = [index for index, shape in enumerate(theirs) if shape in kind]
        found = _single(wanted, [theirs[index] for index in own])
        names.update({str(key): candidates[own[index]] for key, index in zip(group, found, strict=True)})
    return names


def _single(wanted: Sequence[tuple[int, ...] | None], there: Sequence[tuple[int, ...]]) -> list[int]:
    """The one way to find a row of shapes in another in its order. Raises Refused if there is none, or more."""
    # Each taken as early as may be, and as late: the same places are the only ones.
    first = _early(wanted, there)
    late = [len(there) - 1 - index for index in _early(wanted[::-1], there[::-1])][::-1]
    if -1 in first:
        raise Refused(
            f"the optimizer numbers {len(wanted)} parameters whose shapes are not those of the model in its order: "
            f"they are shards of one rank, in another order, or another model's; {SAVE_AGAIN}"
        )
    if first != late:
        raise Refused(
            f"the optimizer numbers {len(wanted)} parameters, and the model has {len(there)} tensors that may be "
            "those: nothing shows which they are; give the model's code with --model module:factory, their names with "
            "--optimizer-names, or " + SAVE_AGAIN
        )
    return first


def _early(wanted: Sequence[tuple[int, ...] | None], there: Sequence[tuple[int, ...]]) -> list[int]:
    """The first place of each shape behind the one before it; -1 for those that aren't found."""
    rest = iter(enumerate(there))
    return [next((index for index, other in rest if shape in (None, other)), -1) for shape in wanted]


def is_numbered(tree: Tree, place: TreePath) -> bool:
    """Return whether the optimizer at a place has numbers instead of names."""
    groups = [entry for path, entry in below(tree, (*place, "param_groups")).items() if path[-1] == "params"]
    return any(isinstance(one, int) for entry in groups for one in value_of(entry))


def refuse_overwritten(tree: Tree) -> None:
    """Raises Refused if two entries of one parameter are one piece of memory in a file.

    FSDP1 on a CPU gathers them one after the other into the same buffer; with `offload_to_cpu=True` and
    `use_orig_params=True` it keeps no copy, and what was gathered last is saved for all of them.
    """
    seen: dict[tuple[TreePath, int], Entry] = {}
    for path, entry in tree.items():
        if "state" not in path[:-1] or entry.meta is None or entry.meta.numel() < 2:
            continue
        other = seen.setdefault((path[:-1], entry.read().data_ptr()), entry)
        if other is not entry:
            raise Refused(
                f"{other.where} and {path[-1]} are the same memory: FSDP1 on a CPU overwrote the first with the second "
                "when it saved; save again without offload_to_cpu, or take the weights alone with --no-optimizer"
            )

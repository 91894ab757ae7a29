"""A source checkpoint, whoever wrote it, as the tree that a checkpoint here has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp2.checkpoint.metadata import TreePath
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.source import dotted
from migration.checkpoints import optimizer
from migration.checkpoints.detect import Found, Piece, look
from migration.checkpoints.names import removed, stripped
from migration.checkpoints.prove import content, summary
from migration.checkpoints.rank_files import OF_SEVERAL
from migration.checkpoints.tree import Entry, Tree, below, is_odd_tensor, is_shard, parts, value_of

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module")
OPTIMIZER_KEYS = ("optim", "optimizer", "optimizers", "optimizer_state_dict", "optim_state_dict", "optimizer_states")
AROUND: tuple[TreePath, ...] = ((), ("app",), ("state",))  # what a Stateful, or Composer, puts around all of it
STEP_KEYS = ("step", "global_step", "iteration", "iter_num")
IN_ORDER = (
    "the optimizer's numbers were taken in the order of model.parameters(), with which all shapes agree; "
    "for another order add --optimizer-names"
)


@dataclass(frozen=True)
class Choice:
    """A user's answers about a source that can't be told from it.

    Attributes:
        model_key: which of several models, by its key or its file.
        optimizer_file: where the optimizer is, if not beside the model.
        order: names in the optimizer's order.
        parameters: the model's parameters in its order, where its code is at hand.
        shapes: of all that is in its state dict, likewise.
        recover: makes of the files of all ranks what they hold, where the model's code is at hand.
    """

    model_key: str | None = None
    optimizer_file: Path | None = None
    with_optimizer: bool = True
    order: Sequence[str] | None = None
    parameters: Sequence[str] | None = None
    shapes: Mapping[str, Sequence[int]] | None = None
    recover: Any = None


@dataclass
class Origin:
    """A source's content, and the facts found out about it.

    Attributes:
        entries: ("app", "model", name) and ("app", "optim", …) -> entry.
        step: optimizer steps done, where that is known, and how.
        originals: name in the source -> plain name, of the model.
        left: lines on what isn't taken.
    """

    found: Found
    entries: dict[TreePath, Entry]
    step: int
    step_from: str | None
    originals: dict[str, str]
    stripped: list[str]
    left: list[str] = field(default_factory=list)

    def model(self) -> dict[str, Entry]:
        return {str(path[2]): entry for path, entry in self.entries.items() if path[1] == "model"}

    def optimizer(self) -> dict[TreePath, Entry]:
        return below(self.entries, ("app", "optim"))

    def groups(self) -> list[dict[str, Any]]:
        """The settings of the optimizer's groups, with plain names under `params`."""
        groups: dict[int, dict[str, Any]] = {}
        for path, entry in self.optimizer().items():
            if path[0] == "param_groups":
                groups.setdefault(int(path[1]), {})[str(path[2])] = entry.read()
        return [groups[index] for index in sorted(groups)]


@contextmanager
def opened_origin(place: Path, choice: Choice) -> Iterator[Origin]:
    """Open a source. Raises Refused, DamagedCheckpoint or OSError."""
    with ExitStack() as stack:
        found = look(place, stack)
        if choice.optimizer_file is not None:
            found.pieces += look(choice.optimizer_file, stack).pieces
        if choice.recover is not None:
            found.pieces = choice.recover(found.pieces)
        yield _origin(found, choice)


def _origin(found: Found, choice: Choice) -> Origin:
    piece, prefix = _model_of(found, choice.model_key)
    tensors = below(piece.tree, prefix)
    names = stripped(dotted(path) for path, entry in tensors.items() if entry.meta is not None)
    if shards := [entry.where for entry in tensors.values() if is_shard(entry)]:
        raise Refused(
            f"{shards[0]} is one rank's part of a tensor; save with torch.distributed.checkpoint, or whole tensors"
        )
    if odd := [entry.where for entry in tensors.values() if is_odd_tensor(entry)]:
        raise Refused(f"{odd[0]} is a tensor without plain data, such as a sparse one; save it as a plain tensor")
    if flat := [name for name in names if "_flat_param" in name]:
        raise Refused(
            f"{found.place}: is a LOCAL_STATE_DICT: {flat[0]} is flat, and its parameters have no names. Load "
            "it in the program that saved it and save with StateDictType.SHARDED_STATE_DICT, or give the model's code "
            "and what was wrapped with --model module:factory --wrap Block"
        )
    model = {names[dotted(path)]: entry for path, entry in tensors.items() if entry.meta is not None}
    if choice.shapes is not None:
        _require_shapes(found, model, choice.shapes)
    entries: dict[TreePath, Entry] = {("app", "model", name): entry for name, entry in model.items()}
    taken = {(id(piece), (*prefix, *path)) for path, entry in tensors.items() if entry.meta is not None}
    left: list[str] = []
    where = _optimizer_of(found) if choice.with_optimizer else None
    if where is not None:
        owner, place = where
        _refuse_shards(owner)
        if owner.is_file:
            optimizer.refuse_overwritten(owner.tree)
        state = optimizer.by_name(below(owner.tree, place), model, parameters=choice.parameters, order=choice.order)
        entries.update({("app", "optim", *path): entry for path, entry in state.items()})
        if optimizer.is_numbered(owner.tree, place):
            left.append(IN_ORDER if choice.order is None else "the optimizer's numbers have the names that were given")
        taken |= {(id(owner), path) for path in owner.tree if path[: len(place)] == place}
    elif choice.with_optimizer:
        left.append("no optimizer is in it: it starts fresh")
    for one in found.pieces:
        rest = {path: entry for path, entry in one.tree.items() if (id(one), path) not in taken}
        label = "" if one.label == "." or len(found.pieces) == 1 else f"{one.label}: "
        left += [f"left out: {label}{part}, {count} entries" for part, count in sorted(parts(rest).items())]
        left += one.notes
    left += [f"left out: {name}" for name in found.aside]
    step, step_from = _step(found, entries)
    return Origin(found, entries, step, step_from, names, removed(names), left)


# --- which is the model ------------------------------------------------------------------------------------


def _model_of(found: Found, wanted: str | None) -> tuple[Piece, TreePath]:
    places = [(piece, prefix) for piece in found.pieces for prefix in _models(piece.tree)]
    if wanted is not None:
        places = [
            (piece, prefix)
            for piece in found.pieces
            for prefix in {*_models(piece.tree), *_prefixes(piece.tree, wanted)}
            if wanted in (piece.label, dotted(prefix), str(prefix[-1:] and prefix[-1]))
        ]
    if not places:
        if any(optimizer.find(piece.tree) == [()] for piece in found.pieces):
            raise Refused(
                f"{found.place}: is an optimizer's state alone; give the model's file, and this as --optimizer"
            )
        there = sorted({part for piece in found.pieces for part in parts(piece.tree)})
        raise Refused(
            f"{found.place}: holds {', '.join(there[:6]) or 'nothing'}, and it isn't clear which are a model's "
            f"weights; name them with --model-key" + (f" ({wanted} holds no tensors)" if wanted is not None else "")
        )
    if len(places) > 1:
        labels = [dotted(prefix) if len(found.pieces) == 1 else piece.label for piece, prefix in places]
        fix = "choose one with --model-key"
        if len(found.pieces) > 1:  # each with an optimizer's state of its own, as a rule
            fix = f"give one of them as SRC, and what was saved with it as --optimizer, or {fix}"
        raise Refused(f"{found.place}: holds several models, {', '.join(labels[:6])}; {fix}")
    return places[0]


def _models(tree: Tree) -> list[TreePath]:
    """The places where a model's state dict may be: under a usual key, or the whole of a flat dict of tensors."""
    usual = [(*around, key) for around in AROUND for key in MODEL_KEYS]
    named = [prefix for prefix in usual if any(e.meta is not None for e in below(tree, prefix).values())]
    if named:
        return [prefix for prefix in named if not any(prefix != one and prefix[: len(one)] == one for one in named)]
    is_flat = all(len(path) == 1 for path in tree) and any(entry.meta is not None for entry in tree.values())
    return [()] if is_flat else []


def _prefixes(tree: Tree, key: str) -> list[TreePath]:
    found = {path[: i + 1] for path, e in tree.items() if e.meta is not None for i in range(len(path) - 1)}
    return [prefix for prefix in found if dotted(prefix) == key]


def _require_shapes(found: Found, model: Mapping[str, Entry], shapes: Mapping[str, Sequence[int]]) -> None:
    there = {name: tuple(entry.meta.shape) for name, entry in model.items() if entry.meta is not None}
    ours = {name: tuple(shape) for name, shape in shapes.items()}
    wrong = [f"{name}: {there.get(name, 'absent')} there, {ours.get(name, 'absent')} in the code" for name in
             sorted(there.keys() | ours.keys()) if there.get(name) != ours.get(name)]  # fmt: skip
    if wrong:
        raise Refused(f"{found.place}: is not of the model that --model makes; {summary(wrong)}")


# --- which is the optimizer ----------------------------------------------------------------------------------


FILES = "give the model's file as SRC and that optimizer's as --optimizer, or "


def _optimizer_of(found: Found) -> tuple[Piece, TreePath] | None:
    places = [(piece, prefix) for piece in found.pieces for prefix in optimizer.find(piece.tree)]
    if len(places) > 1:
        labels = [f"{piece.label} {dotted(prefix)}".strip(". ") for piece, prefix in places]
        raise Refused(
            f"{found.place}: holds {len(places)} optimizers, {', '.join(labels[:6])}; a run here has one: "
            f"{FILES * (len(found.pieces) > 1)}take the weights alone with --no-optimizer"
        )
    if not places:
        strange = [
            f"{piece.label} {part}".strip(". ")
            for piece in found.pieces
            for part in parts(piece.tree)
            if part.split(".")[-1] in OPTIMIZER_KEYS
        ]
        if strange:
            raise Refused(f"{found.place}: {strange[0]} has no parameter groups; {optimizer.SAVE_AGAIN}")
        return None
    return places[0]


def _refuse_shards(piece: Piece) -> None:
    """An optimizer in files of ranks, of which some hold other entries than rank 0's: each has a part."""
    if piece.ranks is None:
        return
    state = [{path for path in tree if "state" in path[:-1]} for tree in piece.ranks.each]
    shapes = [{p: e.meta.shape for p, e in tree.items() if e.meta is not None} for tree in piece.ranks.each]
    whole = piece.ranks.tree
    if any(one != state[0] for one in state) or any(
        shape != shapes[0].get(path) and path in whole and whole[path].meta is not None
        for one in shapes
        for path, shape in one.items()
    ):
        raise Refused(f"{piece.label}: each rank has a shard of the optimizer, without names; {optimizer.SAVE_AGAIN}")
    for path, entry in piece.ranks.each[0].items():
        is_one = (entry.meta is None or entry.meta.numel() < 2) and entry is whole[path]
        counts = path[-1] in STEP_KEYS or (is_one and {"state", "param_groups"} & {*path[:-1]})
        if counts and not all(path in tree and content(entry) == content(tree[path]) for tree in piece.ranks.each):
            raise Refused(f"{entry.where} differs between the ranks; {OF_SEVERAL}")


# --- how far it had come -------------------------------------------------------------------------------------


def _step(found: Found, entries: Tree) -> tuple[int, str | None]:
    """Optimizer steps done, and who says so; 0 and None if nobody does, or the optimizer starts fresh."""
    if not any(path[1] == "optim" for path in entries):
        return 0, None
    steps = [entry for path, entry in entries.items() if path[1:3] == ("optim", "state") and path[-1] == "step"]
    if steps:
        return max(map(optimizer.steps_of, steps)), "as the optimizer counts"
    for piece in found.pieces:
        for around in AROUND:
            for key in STEP_KEYS:
                entry = piece.tree.get((*around, key))
                value = value_of(entry) if entry is not None and entry.meta is None else None
                if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < optimizer.MOST_STEPS:
                    return value, f"as {dotted((*around, key))} says"
    return 0, None

"""`--to fsdp1-full`: from a checkpoint of training here, or of FSDP1, to the full state dicts that FSDP1 loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.metadata import TreePath
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.opening import opened, require_undamaged
from fsdp2.checkpoint.sources.pt_file import open_pt, write_pt
from fsdp2.checkpoint.sources.source import dotted
from fsdp2_tools.checkpoint.export import WRITING, give_name, new_path, whole_or_absent
from migration.checkpoints.detect import is_fsdp1s
from migration.checkpoints.origin import Choice, opened_origin
from migration.checkpoints.prove import Proof, compare
from migration.checkpoints.tree import Entry, Tree, below, parts, tree_of

# Where a part of a checkpoint here goes in the file.
MODEL, OPTIMIZER = ("model",), ("optimizer",)

HOW_TO_LOAD = (
    "next: state = torch.load({out!r}, weights_only=True, mmap=True); with FSDP.state_dict_type(model, "
    "StateDictType.FULL_STATE_DICT): model.load_state_dict(state['model'])"
)
LOAD_OPTIMIZER = "; optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state['optimizer']))"


def back(place: str, out: str, choice: Choice) -> tuple[list[str], Proof]:
    """Write {"model": …, "optimizer": …, "step": …}, by parameters' names, and compare it with the source.

    Args:
        place: a checkpoint, or a run (its newest), or what FSDP1 left, as `choice` understands it.
        out: the new `.pt`.

    Returns lines for the user, and the proof. Raises Refused, DamagedCheckpoint, OSError or Differs; there is no
    file then.
    """
    target = new_path(out)
    aside = new_path(f"{target}.tmp", hint=WRITING)
    with _tree(place, choice) as (tree, notes):
        entries, left = _arranged(tree)
        if not entries:
            raise Refused(f"{place}: holds no app.model; give a checkpoint of fsdp2.train, or one that was converted")
        named = {dotted(path): entry for path, entry in entries.items()}
        places = {dotted(path): path for path in entries}
        values = {places[name]: entry.read() for name, entry in named.items() if entry.meta is None}

        def arrange(state: dict[str, Tensor]) -> Any:
            return _nested({**{places[name]: tensor for name, tensor in state.items()}, **values})

        LocalFiles(target.parent).mkdir("")
        metas = {name: entry.meta for name, entry in named.items() if entry.meta is not None}
        with whole_or_absent(aside, folder=False):
            write_pt(aside, metas, lambda name: named[name].read().contiguous(), arrange)
            written = open_pt(str(target), aside)
            proof = compare(entries, written.paths, written.read)
            give_name(aside, target)
    has_optimizer = any(path[0] == OPTIMIZER[0] for path in entries)
    lines = [f"wrote {out}: a full state dict of {proof.tensors} tensors" + " and its optimizer" * has_optimizer]
    lines += [HOW_TO_LOAD.format(out=out) + LOAD_OPTIMIZER * has_optimizer]
    return lines + notes + [f"left out: {part}, {count} entries" for part, count in sorted(left.items())], proof


@contextmanager
def _tree(place: str, choice: Choice) -> Iterator[tuple[Tree, list[str]]]:
    """A checkpoint's entries, and lines on what of FSDP1's isn't among them."""
    if is_fsdp1s(place):
        with opened_origin(Path(place), choice) as origin:
            yield origin.entries, origin.left
        return
    with opened(place, "dcp") as source:
        require_undamaged(source)
        yield tree_of(source), []


def _arranged(tree: Tree) -> tuple[dict[TreePath, Entry], dict[str, int]]:
    """Path in the file -> entry; and what has no place in it."""
    model, optimizer = below(tree, ("app", "model")), below(tree, ("app", "optim"))
    entries: dict[TreePath, Entry] = {(*MODEL, dotted(path)): entry for path, entry in model.items()}
    if not entries:
        return {}, {}
    if not below(tree, ("app", "scheduler")):  # then a conversion has added it, and loads fail by what none has set
        optimizer = {path: entry for path, entry in optimizer.items() if path[-1] != "initial_lr"}
    entries |= {(*OPTIMIZER, *path): entry for path, entry in optimizer.items()}
    if step := tree.get(("app", "progress", "step")):
        entries["step",] = step
    rest = {p: e for p, e in tree.items() if p[:2] not in (("app", "model"), ("app", "optim"), ("app", "progress"))}
    return entries, parts(rest)


def _nested(flat: dict[TreePath, Any]) -> dict[str, Any]:
    """The nested form; each number below `param_groups` is a place in a list."""
    root: dict[Any, Any] = {MODEL[0]: {}}
    if any(path[0] == OPTIMIZER[0] for path in flat):
        root[OPTIMIZER[0]] = {"state": {}, "param_groups": []}
    groups: dict[int, dict[str, Any]] = {}
    for path, value in flat.items():
        if path[:2] == (*OPTIMIZER, "param_groups"):
            groups.setdefault(int(path[2]), {})[str(path[3])] = value
            continue
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    if groups:
        root[OPTIMIZER[0]]["param_groups"] = [groups[index] for index in sorted(groups)]
    return root

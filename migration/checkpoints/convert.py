"""From a checkpoint of FSDP1 to one that training here resumes from, committed only when it is proven."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.metadata import TreePath
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.dcp_tensors import DcpTensors
from fsdp2.checkpoint.sources.source import dotted
from fsdp2_tools.checkpoint.export import new_path
from fsdp2_tools.checkpoint.import_ import is_not_fp32, require_name, write_imported
from migration.checkpoints.optimizer import may_be_parameters
from migration.checkpoints.origin import Choice, Origin, opened_origin
from migration.checkpoints.prove import Proof, compare
from migration.checkpoints.tree import Entry, value_of

ANEW = "not taken from there, so it starts fresh: learning rate schedule, place in the data, random state, scaler"


@dataclass
class Converted:
    """The outcome of a conversion.

    Attributes:
        lines: for the user.
        groups: settings of the optimizer's groups, with names under `params`.
        kinds: of entries in its state: exp_avg and so on.
        parameters: names of what may be a parameter of the model.
        narrow: how many tensors aren't fp32, which a resume refuses.
    """

    target: Path
    lines: list[str]
    proof: Proof
    groups: list[dict[str, Any]]
    kinds: set[str]
    parameters: list[str]
    narrow: int


def convert(place: Path, out: str, choice: Choice) -> Converted:
    """Write the checkpoint, one tensor at a time, and compare it with the source before it exists.

    Raises Refused, DamagedCheckpoint, OSError or Differs; there is no checkpoint then.
    """
    target = new_path(out)
    if place.is_dir() and target.is_relative_to(place.absolute()):
        raise Refused(f"{out}: is inside of the source, which is not written to; choose another path")
    with opened_origin(place, choice) as origin:
        require_name(target, origin.step, f"the source is of step {origin.step}")
        entries = origin.entries | _progress(origin)
        values = {dotted(path): value_of(entry) for path, entry in entries.items() if entry.meta is None}
        named = {dotted(path): entry for path, entry in entries.items()}
        proofs: list[Proof] = []
        nonfinite = write_imported(
            target,
            {name: entry.meta for name, entry in named.items() if entry.meta is not None},
            values,
            {dotted(path): path for path in entries},
            lambda name: named[name].read(),
            source=place.name,
            step=origin.step,
            check=lambda: proofs.append(_prove(place, choice, target)),
        )
        kinds = {str(path[-1]) for path in entries if path[1:3] == ("optim", "state")}
        parameters = choice.parameters or may_be_parameters(origin.model())
        lines = _lines(origin, out) + nonfinite
        narrow = [entry for entry in entries.values() if is_not_fp32(entry.meta)]
        if narrow:
            lines.append(
                f"{len(narrow)} tensors, such as {narrow[0].where}, are not fp32, which training here keeps: "
                "--init-from takes the weights, and the optimizer starts fresh"
            )
        return Converted(target, lines, proofs[0], origin.groups(), kinds, list(parameters), len(narrow))


def _progress(origin: Origin) -> dict[TreePath, Entry]:
    """The run's progress, if the source says so. Its metrics are in no file of ours."""
    if origin.step_from is None:
        return {}
    where = "how far the run had come"
    values: dict[str, Callable[[], Any]] = {"step": partial(int, origin.step), "metrics_position": int}
    return {("app", "progress", name): Entry(None, read, where) for name, read in values.items()}


def _prove(place: Path, choice: Choice, target: Path) -> Proof:
    """Read both sides again: the source as if nothing of it were known, and the files as they lie on disk."""
    with opened_origin(place, choice) as origin, closing(DcpTensors(LocalFiles(target))) as written:
        after = {*written.tensors, *written.values}
        ours = {name for name in after if name.startswith("app.progress.") or name.endswith(".initial_lr")}
        kept = {dotted(path) for path in origin.entries}
        return compare(origin.entries, dict.fromkeys(after - (ours - kept)), written.read)


def _lines(origin: Origin, out: str) -> list[str]:
    found, optimizer = origin.found, origin.optimizer()
    labels = ", ".join(piece.label for piece in found.pieces if piece.label != ".")
    lines = [f"read {found.place}: {found.kind} of {found.writer}" + (f" ({labels})" if labels else "")]
    if not all(piece.checked for piece in found.pieces):
        lines.append("the source has no hashes; it was taken as it is")
    if origin.stripped:
        lines.append(f"taken out of names: {' '.join(origin.stripped)}")
    model = origin.model()
    state = {path[1] for path in optimizer if path[0] == "state"}
    what = f"{len(model)} tensors of a model"
    groups = origin.groups()
    if optimizer:
        what += f", optimizer state of {len(state)} parameters in {len(groups)} group{'s' * (len(groups) > 1)}"
    why = origin.step_from or ("since nothing says which" if optimizer else "since the optimizer starts fresh")
    step = f"step {origin.step}, {why}"
    lines.append(f"wrote {out}: {what}; {step}")
    if state and (without := [name for group in groups for name in group.get("params", ()) if name not in state]):
        lines.append(f"{len(without)} parameters have no optimizer state, frozen or never used: {without[0]}, …")
    lines += origin.left
    return [*lines, ANEW]

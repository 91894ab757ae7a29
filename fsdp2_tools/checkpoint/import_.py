"""`import`: a checkpoint that training resumes from, of another program's weights and optimizer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.metadata import TreePath
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.opening import CHECKPOINT_NAME, opened, require_undamaged
from fsdp2.checkpoint.sources.source import Source, dotted, part_of, weights, weights_prefix
from fsdp2.checkpoint.store import write_marker
from fsdp2_extra.models.lora import is_adapter
from fsdp2_tools.checkpoint.dcp_write import write_dcp
from fsdp2_tools.checkpoint.export import new_path, whole_or_absent
from fsdp2_tools.checkpoint.nonfinite import Nonfinite


def import_(place: str, out: str, kind: str = "auto", *, model: Container[str] | None = None) -> list[str]:
    """Make a committed checkpoint of step 0, one tensor at a time.

    Args:
        place: what `opened` takes: state dicts as {"app": …}, {"model": …} or with plain names.
        out: the new directory; if it has the name of a checkpoint, it must be that of step 0.
        kind: `auto`, `pt`, `safetensors` or `dcp`.
        model: the names of the model's tensors, where they are known: a resume takes no others.

    Returns lines that say what was taken and what was left out. Raises Refused, DamagedCheckpoint or OSError;
    there is no checkpoint then.
    """
    target = new_path(out)
    require_name(target, 0, "an imported checkpoint is of step 0")
    with opened(place, kind) as source:
        checked = require_undamaged(source)
        names = weights(source)
        # LoRA's pairs, or whatever else peft names as its own.
        if any(is_adapter(name) or name.startswith("base_model.model.") or ".base_layer." in name for name in names):
            raise Refused(f"{source.place}: holds adapters, which a run takes from its own alone; merge them with peft")
        if model is not None and (other := next((name for name in names if name not in model), None)):
            raise Refused(
                f"{source.place}: transformers makes other tensors of {other}, so no run resumes from these; begin one "
                f"with --init-from {place}"
            )
        optimizer, problem = _optimizer(source, names)
        paths: dict[TreePath, str] = {("app", "model", name): original for name, original in names.items()} | optimizer
        originals = {dotted(path): original for path, original in paths.items()}
        values = {name: source.read(original) for name, original in originals.items() if original in source.values}
        wrong = write_imported(
            target,
            {name: source.tensors[original] for name, original in originals.items() if name not in values},
            values,
            {dotted(path): path for path in paths},
            lambda name: source.read(originals[name]),
            source=source.place.rsplit("/", 1)[-1],
        )
        lines = [f"wrote {target}: {len(names)} tensors of a model" + (" and its optimizer" if optimizer else "")]
        lines += [f"the source is {checked}", *wrong]
        if others := [name for name, original in names.items() if is_not_fp32(source.tensors[original])]:
            lines.append(
                f"{len(others)} tensors are {source.tensors[names[others[0]]].dtype}, and training here keeps fp32: to "
                "resume from them, import what `export --dtype fp32` makes of them"
            )
        if (groups := len({path[3] for path in paths if path[:3] == ("app", "optim", "param_groups")})) > 1:
            lines.append(
                f"its optimizer has {groups} groups of parameters, and the run that resumes needs the same: "
                "--weight-decay makes two, of weights and of norms and biases"
            )
        lines += [f"left out: {problem}"] if problem else []
        taken = set(originals.values())
        rest = Counter(part_of(path) for name, path in source.paths.items() if name not in taken)
        return lines + [f"left out: {part}, {count} entries" for part, count in sorted(rest.items())]


def require_name(target: Path, step: int, why: str) -> None:
    """Raises Refused if a directory has the name of a checkpoint of another step."""
    named = CHECKPOINT_NAME.fullmatch(target.name)
    if named and (named[1] or int(named[2]) != step):
        raise Refused(f"{target}: {why}; name it step-{step:08d}, or not like a step")


def write_imported(
    target: Path,
    tensors: Mapping[str, Tensor],
    values: dict[str, Any],
    paths: Mapping[str, TreePath],
    read: Callable[[str], Tensor],
    *,
    source: str,
    step: int = 0,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """Make a committed checkpoint of tensors and plain values, one tensor at a time, or leave nothing.

    Args:
        target: the new directory.
        tensors: name, as in a run's checkpoint, -> tensor on `meta`.
        paths: name -> its place in the nested state dict, of tensors and values.
        read: name -> that tensor on the CPU.
        source: what the marker says it was made of.
        check: called when all is written and durable; if it raises, there is no checkpoint.

    Returns a line if weights hold NaN or infinity; the marker says so too.
    """
    places = {**paths, **_add_initial_rates(values)}
    model = {path[2]: list(tensors[name].shape) for name, path in paths.items() if path[:2] == ("app", "model")}
    info = {
        "step": step,
        "world_size": 1,
        "mesh": {"replicate": 1, "shard": 1},
        "config": {},
        "environment": {"torch": torch.__version__},
        "model": model,
        "imported": True,
        "source": source,
        "time": time.time(),
    }
    files, nonfinite = LocalFiles(target), Nonfinite()

    def read_and_look(name: str) -> Tensor:
        tensor = read(name).contiguous()
        if paths[name][:2] == ("app", "model"):
            nonfinite.look(str(paths[name][2]), tensor)
        return tensor

    def commit(written: Mapping[str, Mapping[str, Any]]) -> None:
        check()
        write_marker(files, {**info, "finite": not nonfinite.names, "files": dict(sorted(written.items()))})

    LocalFiles(target.parent).mkdir("")
    with whole_or_absent(target, folder=True):
        LocalFiles(target.parent).fsync("")
        write_dcp(files, tensors, values, places, read_and_look, commit)
    return nonfinite.note()


def is_not_fp32(tensor: Tensor | None) -> bool:
    """Return whether a tensor, if it is one, has numbers with a point in another dtype."""
    return tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float32


def _optimizer(source: Source, weight_names: Container[str]) -> tuple[dict[TreePath, str], str | None]:
    """New path -> name in the source, of an optimizer's state by parameter name; or {} and why it isn't taken."""
    model = weights_prefix(source)
    for key in ("optim", "optimizer"):
        prefix = (*model[:-1], key)
        found = {path[len(prefix) :]: name for name, path in source.paths.items() if path[: len(prefix)] == prefix}
        if not model or not found:
            continue
        for rest in found:
            is_group = len(rest) > 2 and rest[0] == "param_groups" and isinstance(rest[1], int)
            if not is_group and (len(rest) < 3 or rest[0] != "state"):
                return {}, f"{dotted(prefix)} is not as get_state_dict gives it: {dotted(rest)} is in it"
            if rest[0] == "state" and rest[1] not in weight_names:
                return (
                    {},
                    f"{dotted(prefix)} has state of {rest[1]!r}, which names no weight; get_state_dict gives names",
                )
        return {("app", "optim", *rest): name for rest, name in found.items()}, None
    return {}, None


def _add_initial_rates(values: dict[str, Any]) -> dict[str, TreePath]:
    """The paths of what was added: a scheduler notes the first learning rate in each group of the optimizer, and
    restoring is strict; a source that had no scheduler lacks it."""
    added: dict[str, TreePath] = {}
    for name in list(values):
        group = name.removesuffix(".lr")
        if name.startswith("app.optim.param_groups.") and group != name and f"{group}.initial_lr" not in values:
            values[f"{group}.initial_lr"] = values[name]
            added[f"{group}.initial_lr"] = ("app", "optim", "param_groups", int(group.rsplit(".", 1)[-1]), "initial_lr")
    return added

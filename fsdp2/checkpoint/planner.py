"""Reading a checkpoint with DCP, strictly: all of it into all of the targets, or an error that lists names.

Source: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from fsdp2.checkpoint.archive import parse_archive
from fsdp2.checkpoint.metadata import misses
from fsdp2.checkpoint.refusal import Refused


def misfit(saved: Any, target: Any) -> str | None:
    """A tensor's difference from its target in dtype or shape, or the part that is missing; None if it fits."""
    if isinstance(saved, TensorStorageMetadata) != isinstance(target, Tensor):
        here, there = ("a tensor", "a plain value") if isinstance(target, Tensor) else ("a plain value", "a tensor")
        return f"{there} in the checkpoint, {here} here"
    if not isinstance(saved, TensorStorageMetadata):
        return None
    theirs, ours = (saved.properties.dtype, tuple(saved.size)), (target.dtype, tuple(target.shape))
    if theirs != ours:
        return f"{theirs[0]} {theirs[1]} in the checkpoint, {ours[0]} {ours[1]} here"
    # Torch reads the chunks that there are, and leaves the rest of a target as it is.
    return misses(saved.size, [(chunk.offsets, chunk.sizes) for chunk in saved.chunks])


class StrictLoadPlanner(DefaultLoadPlanner):
    """Reads a checkpoint only if its tensors and the targets are the same ones, in both directions.

    Torch's planner ignores what is in the checkpoint and not among the targets, and holes in a tensor. It also
    unpickles plain values freely; here they are read by `archive.py`, and each must be of its target's type.

    Names in the checkpoint that begin with one of `ignore` need no target. Targets whose names match `keep` stay as
    they are where the checkpoint lacks them.

    `set_up_planner` raises ValueError that lists what differs, `load_bytes` raises Refused for a value of another type.
    """

    def __init__(self, ignore: tuple[str, ...] = (), keep: re.Pattern[str] | None = None) -> None:
        super().__init__()
        self.ignore, self.keep = ignore, keep

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        saved = metadata.state_dict_metadata
        if self.keep is not None:
            is_kept = self.keep.fullmatch
            self.state_dict = {n: v for n, v in self.state_dict.items() if n in saved or not is_kept(n)}
        wanted = self.state_dict
        problems = [f"{name}: not in the checkpoint" for name in sorted(wanted.keys() - saved.keys())]
        problems += [
            f"{name}: in the checkpoint, and nothing to load it into"
            for name in sorted(saved.keys() - wanted.keys())
            if not name.startswith(self.ignore)
        ]
        for name in sorted(wanted.keys() & saved.keys()):
            if difference := misfit(saved[name], wanted[name]):
                problems.append(f"{name}: {difference}")
        if problems:
            raise ValueError(
                f"the checkpoint and this run differ in {len(problems)} entries: " + "; ".join(problems[:20])
            )

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        name = read_item.dest_index.fqn
        loaded = parse_archive(value.getbuffer())
        # torch's optimizers use their settings without a look: also a tuple's parts have to be as they are here.
        whole, ours = name.startswith("app.optim.") and not name.endswith(".params"), self.state_dict[name]
        if not _fits(loaded, ours, whole=whole):
            kinds = type(loaded).__name__, type(ours).__name__
            raise Refused(f"is a {kinds[0]} of another kind than the {kinds[1]} here")
        self.state_dict[name] = loaded
        if self.flatten_state_dict:
            tree: Any = self.original_state_dict
            *path, last = self.mappings[name]
            for key in path:
                tree = tree[key]
            tree[last] = loaded


def _fits(loaded: Any, target: Any, *, whole: bool) -> bool:
    """True if a plain value can take another's place. A setting may be unset, and a number be written in two ways."""
    if loaded is None or target is None:
        return True
    if isinstance(loaded, (tuple, list)) and isinstance(target, (tuple, list)):
        pairs = zip(loaded, target, strict=False)
        return not whole or (len(loaded) == len(target) and all(_fits(a, b, whole=True) for a, b in pairs))
    kinds = {type(loaded), type(target)}
    return len(kinds) == 1 or kinds == {int, float} or (isinstance(loaded, dict) and isinstance(target, dict))

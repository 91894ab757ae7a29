"""The state of a training run as a tree of tensors and plain values, and its way to and from DCP files."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from fsdp2.checkpoint.safe_reader import SafeReader


class Part(Protocol):
    """Anything with a state: a scheduler, a gradient scaler, a place in the data."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class AppState(Stateful):
    """Model, optimizer and any further parts, as one Stateful for `dcp.save` and `dcp.load`.

    `get_state_dict` gives the parameters their plain names under every strategy and the optimizer's state
    the names of its parameters, so that a checkpoint can be read at another world size or by another
    strategy. Sharded tensors stay sharded: no collective is issued here.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, parts: Mapping[str, Part]) -> None:
        self.model, self.optimizer, self.parts = model, optimizer, parts

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optim": optimizer,
            **{name: part.state_dict() for name, part in self.parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # How the optimizer computes belongs to this machine: a checkpoint from a GPU says fused.
        ours: list[dict[str, Any]] = [
            {k: group[k] for k in ("foreach", "fused") if k in group} for group in self.optimizer.param_groups
        ]
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=StateDictOptions(strict=True),
        )
        for group, implementation in zip(self.optimizer.param_groups, ours, strict=True):
            group.update(implementation)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


class WeightsOnly(Stateful):
    """The model alone, for inference from a sharded checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {"model": get_model_state_dict(self.model)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state["model"], options=StateDictOptions(strict=True))


class SchedulerState:
    """What of a learning rate scheduler changes while it runs. The rest comes from flags, and has other
    names from one torch version to the next."""

    KEYS = ("last_epoch", "_step_count", "_last_lr")

    def __init__(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        state = self.scheduler.state_dict()
        return {key: state[key] for key in self.KEYS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)


@dataclass
class Progress:
    """Optimizer steps done, and the bytes of the metrics file that belong to them."""

    step: int = 0
    metrics_position: int = 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.metrics_position = state["step"], state["metrics_position"]


class RandomState:
    """The random generators of this rank: torch on CPU and GPU, Python's and NumPy's, as tensors.

    Each rank saves its own under its number. What a rank finds is its own from a run of the same world size;
    `restorable` says so beforehand, because there is no right answer for another one.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.key, self.device = f"rank{rank}", device

    def state_dict(self) -> dict[str, Any]:
        _, words, gauss = random.getstate()
        _, keys, position, has_gauss, cached = numpy.random.get_state()
        state = {
            "torch": torch.get_rng_state(),
            "python": torch.tensor(words),
            "python_gauss": torch.tensor(float("nan") if gauss is None else gauss, dtype=torch.float64),
            "numpy": torch.tensor([*map(int, keys), position, has_gauss]),
            "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
        }
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return {self.key: state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine: dict[str, Tensor] = state[self.key]
        torch.set_rng_state(mine["torch"])
        gauss = float(mine["python_gauss"])
        random.setstate((3, tuple(mine["python"].tolist()), None if gauss != gauss else gauss))
        *keys, position, has_gauss = mine["numpy"].tolist()
        numpy.random.set_state(
            ("MT19937", numpy.array(keys, numpy.uint32), position, has_gauss, float(mine["numpy_gauss"]))
        )
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(mine["cuda"], self.device)


class StrictLoadPlanner(DefaultLoadPlanner):
    """Reads a checkpoint only if its tensors and the targets are the same ones, in both directions.

    Torch's planner ignores what is in the checkpoint and not among the targets. It also unpickles plain
    values freely; here they may only be what `weights_only` allows.

    Names in the checkpoint that begin with one of `ignore` need no target.
    """

    def __init__(self, ignore: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.ignore = ignore

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        saved, wanted = metadata.state_dict_metadata, self.state_dict
        problems = [f"{name}: not in the checkpoint" for name in sorted(wanted.keys() - saved.keys())]
        problems += [
            f"{name}: in the checkpoint, and nothing to load it into"
            for name in sorted(saved.keys() - wanted.keys())
            if not name.startswith(self.ignore)
        ]
        for name in sorted(wanted.keys() & saved.keys()):
            entry, target = saved[name], wanted[name]
            if isinstance(entry, TensorStorageMetadata) and isinstance(target, Tensor):
                theirs, ours = (entry.properties.dtype, entry.size), (target.dtype, target.shape)
                if theirs != ours:
                    problems.append(
                        f"{name}: {theirs[0]} {tuple(theirs[1])} in the checkpoint, {ours[0]} {tuple(ours[1])} here"
                    )
        if problems:
            raise ValueError(f"the checkpoint and this run differ in {len(problems)}: " + "; ".join(problems[:20]))

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.state_dict[read_item.dest_index.fqn] = loaded = torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            _set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


def _set_element(tree: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Set a leaf of nested dicts and lists by its path."""
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value


def _load(state: Stateful, directory: Path, ignore: tuple[str, ...]) -> None:
    reader = SafeReader(directory)
    reader.read_metadata()  # fails here for what isn't metadata; dcp.load would look for other files first
    try:
        dcp.load({"app": state}, storage_reader=reader, planner=StrictLoadPlanner(ignore))
    except CheckpointException as error:
        # It is no Exception, and its text is the tracebacks of all ranks; the cause says what is wrong.
        cause, _ = next(iter(error.failures.values()))
        raise cause from None


def write_shards(app: AppState, directory: Path) -> None:
    """Save into an empty directory with DCP: each rank its own shards, synced to disk. A collective call."""
    dcp.save({"app": app}, storage_writer=dcp.FileSystemWriter(directory, sync_files=True))


def read_shards(app: AppState, directory: Path, *, saved_world_size: int) -> bool:
    """Load in place with DCP, whatever world size it was saved at. A collective call.

    Returns whether the ranks' random generators were restored. At another world size, or from a run without
    the GPU that there is now, they are other generators, and the caller must seed them anew. Raises
    ValueError that lists what differs.
    """
    saved = SafeReader(directory).read_metadata().state_dict_metadata
    ours = [f"app.rng.{rank}.{name}" for rank, state in app.parts["rng"].state_dict().items() for name in state]
    restorable = saved_world_size == dist.get_world_size() and all(name in saved for name in ours)
    if not restorable:
        app = AppState(app.model, app.optimizer, {k: v for k, v in app.parts.items() if k != "rng"})
    _load(app, directory, ignore=("app.rng.",))
    return restorable


def read_weights(model: nn.Module, directory: Path) -> None:
    """Load the weights alone into a sharded model; no rank sees a full copy. A collective call."""
    everything_else = (
        "app.optim.",
        "app.scheduler.",
        "app.scaler.",
        "app.batches.",
        "app.progress.",
        "app.rng.",
    )
    _load(WeightsOnly(model), directory, everything_else)

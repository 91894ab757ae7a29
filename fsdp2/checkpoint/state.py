"""The state of a training run as a tree of tensors and plain values: objects, and no files."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

HOW = ("foreach", "fused", "capturable", "differentiable")  # settings of how an optimizer computes, and not what


class Part(Protocol):
    """Anything with a state: a scheduler, a gradient scaler, a place in the data."""

    def state_dict(self) -> dict[str, Any]:
        """The part that a checkpoint saves."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take what `state_dict` gave, on any number of ranks."""


class StateHolder(Protocol):
    """A strategy that keeps its state in another form, and must gather it before it is read."""

    def gather_state(self) -> None:
        """Called before the state is read. A collective call."""

    def scatter_state(self) -> None:
        """Called after a checkpoint was loaded into the state."""

    def release_state(self) -> None:
        """Called when what was read from the state isn't needed any more."""


class AppState(Stateful):
    """Model, optimizer and any further parts, as one Stateful for `dcp.save` and `dcp.load`.

    `get_state_dict` gives the parameters their plain names under every strategy and the optimizer's state
    the names of its parameters, so that a checkpoint can be read at another world size or by another
    strategy. Sharded tensors stay sharded: no collective is issued here, unless by the source of the state.

    Args:
        not_saved: whether a weight of this name is kept elsewhere, such as those of the model that adapters are for:
            it isn't saved, and a restore leaves it as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[str, Part],
        source: StateHolder | None = None,
        not_saved: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.model, self.optimizer, self.parts, self.source = model, optimizer, parts, source
        self.not_saved = not_saved
        self._groups: Counter[frozenset[str]] = Counter()  # names in each of the optimizer's, as `state_dict` gave them

    def with_parts(self, parts: Mapping[str, Part]) -> AppState:
        """The same model and optimizer with other parts."""
        return AppState(self.model, self.optimizer, parts, self.source, self.not_saved)

    def gather(self) -> None:
        """To be called before `model` and `optimizer` are read."""
        if self.source is not None:
            self.source.gather_state()

    def release(self) -> None:
        """To be called when what was gathered, or a tree that `state_dict` gave, has been written."""
        if self.source is not None:
            self.source.release_state()

    def state_dict(self) -> dict[str, Any]:
        """Sharded DTensors of model and optimizer, by names that don't depend on the world size. A collective call."""
        self.gather()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        self._groups = _groups(optimizer)
        return {
            "model": {name: tensor for name, tensor in model.items() if not self.not_saved(name)},
            "optim": optimizer,
            **{name: part.state_dict() for name, part in self.parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was loaded into `state_dict()`. A collective call. Raises RuntimeError for names that differ, and
        ValueError for an optimizer that groups them differently."""
        # Of groups that share a parameter, torch gives one of here the settings of any one there.
        if apart := _groups(state["optim"]) - self._groups:
            raise ValueError(
                f"its optimizer has {', '.join(sorted(next(iter(apart)))[:2])} … in one group, and here they are with "
                "other parameters; --resume-partial takes the weights alone"
            )
        # How the optimizer computes belongs to this machine: a checkpoint from a GPU says fused.
        ours: list[dict[str, Any]] = [{k: group[k] for k in HOW if k in group} for group in self.optimizer.param_groups]
        # Weights that are kept elsewhere are set to what they are.
        here = {name: one for name, one in get_model_state_dict(self.model).items() if self.not_saved(name)}
        with _counted_as_trained(self.optimizer):
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict={**here, **state["model"]},
                optim_state_dict=state["optim"],
                options=StateDictOptions(strict=True),
            )
        for group, implementation in zip(self.optimizer.param_groups, ours, strict=True):
            group.update(implementation)
        if self.source is not None:
            self.source.scatter_state()
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def _groups(optimizer: Mapping[str, Any]) -> Counter[frozenset[str]]:
    """The names in each group of an optimizer, in whatever order those are."""
    return Counter(frozenset(group["params"]) for group in optimizer["param_groups"])


@contextmanager
def _counted_as_trained(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let `set_state_dict` restore the optimizer's state of frozen parameters too.

    It drops, without a word, the state of parameters that don't require a gradient at that moment: see
    https://github.com/pytorch/pytorch/issues/192202
    """
    frozen = [p for group in optimizer.param_groups for p in group["params"] if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


class WeightsOnly(Stateful):
    """The model alone; `source`, `not_saved` and `parts` as in `AppState`."""

    def __init__(
        self,
        model: nn.Module,
        source: StateHolder | None,
        not_saved: Callable[[str], bool] = lambda name: False,
        parts: Mapping[str, Part] = {},
    ) -> None:
        self.model, self.source, self.not_saved, self.parts = model, source, not_saved, parts

    def state_dict(self) -> dict[str, Any]:
        """Sharded DTensors of the model, and the parts. A collective call."""
        if self.source is not None:
            self.source.gather_state()
        weights = get_model_state_dict(self.model)
        model = {name: tensor for name, tensor in weights.items() if not self.not_saved(name)}
        return {"model": model, **{name: part.state_dict() for name, part in self.parts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was loaded into `state_dict()`. Raises RuntimeError for names that differ."""
        here = {name: one for name, one in get_model_state_dict(self.model).items() if self.not_saved(name)}
        set_model_state_dict(self.model, {**here, **state["model"]}, options=StateDictOptions(strict=True))
        if self.source is not None:
            self.source.scatter_state()
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


class SchedulerState:
    """The part of a learning rate scheduler that changes while it runs. The rest comes from flags, and has other
    names from one torch version to the next."""

    KEYS = ("last_epoch", "_step_count", "_last_lr")

    def __init__(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        state = self.scheduler.state_dict()
        return {key: state[key] for key in self.KEYS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for what no scheduler says."""
        _require_counts("scheduler", state, ("last_epoch", "_step_count"))
        if not all(isinstance(rate, (float, int)) for rate in state["_last_lr"]):
            raise ValueError(f"scheduler: the learning rates are {str(state['_last_lr'])[:80]}")
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), **state})


@dataclass
class Progress:
    """Optimizer steps done, and the bytes of the metrics file that belong to them."""

    step: int = 0
    metrics_position: int = 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for what can't be."""
        _require_counts("progress", state, ("step", "metrics_position"))
        self.step, self.metrics_position = state["step"], state["metrics_position"]


def _require_counts(part: str, state: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ValueError unless these are whole numbers that count something."""
    for name in names:
        if type(state[name]) is not int or not 0 <= state[name] < 1 << 63:
            raise ValueError(f"{part}: its {name} is {str(state[name])[:40]} in the checkpoint, which isn't a count")


class RandomState:
    """The random generators of this rank: torch on CPU and GPU, Python's and NumPy's, as tensors.

    Each rank saves its own under its number. What a rank finds is its own from a run of the same world size, in which
    as many draw `alike`, as they split a layer: for others there is no right answer, and `restore` says so.
    """

    def __init__(self, rank: int, device: torch.device, alike: int = 1) -> None:
        self.key, self.device = f"rank{rank}" + (f"-of-tp{alike}" if alike > 1 else ""), device
        self.unlike = rank // alike  # the number of those that draw as this rank does

    def state_dict(self) -> dict[str, Any]:
        """The states of torch's, Python's and NumPy's generators on this rank, as tensors."""
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
        """Raises ValueError for what no generator says."""
        try:
            self._load(state[self.key])
        except (RuntimeError, OverflowError, TypeError) as error:
            raise ValueError(f"random state of {self.key}: can't be set ({error})") from error

    def _load(self, mine: dict[str, Tensor]) -> None:
        torch.set_rng_state(mine["torch"])
        gauss = float(mine["python_gauss"])
        random.setstate((3, tuple(mine["python"].tolist()), None if gauss != gauss else gauss))
        *keys, position, has_gauss = mine["numpy"].tolist()
        numpy.random.set_state(
            ("MT19937", numpy.array(keys, numpy.uint32), position, has_gauss, float(mine["numpy_gauss"]))
        )
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(mine["cuda"], self.device)


def seed_everything(seed: int, *context: int) -> None:
    """Seed torch, Python and NumPy, for dropout and the like, from the run's seed and, say, the rank."""
    digest = hashlib.sha256("/".join(map(str, (seed, *context))).encode()).digest()
    number = int.from_bytes(digest[:4], "big")
    torch.manual_seed(number)  # every GPU too
    random.seed(number)
    numpy.random.seed(number)


def plain_names(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """`model.state_dict()` without DDP's prefix; sharded tensors stay sharded, and nothing is sent."""
    state = model.state_dict(keep_vars=keep_vars)
    consume_prefix_in_state_dict_if_present(state, "module.")
    return state


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """True if this rank's part of tensors of any shape is free of NaN and infinity; integers are. Waits for a GPU."""
    extremes: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        part = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        part = torch.view_as_real(part) if part.is_complex() else part
        if part.numel() and part.is_floating_point():
            # NaN if there is one. It reads the memory once and copies nothing: a twentieth of the time of isfinite().
            extremes.setdefault(part.device, []).extend(one.double() for one in torch.aminmax(part))
    return all(bool(torch.stack(values).isfinite().all()) for values in extremes.values())

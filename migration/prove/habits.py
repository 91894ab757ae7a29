"""Faults that a program has on any number of ranks, so that a comparison with one rank shows none of them.

`Habits` watches for them beside the recorder, and the rules read what it wrote.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

from migration.checkpoints.names import stripped
from migration.prove.record import Record

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMS = (*BATCH_NORMS, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
SHUFFLED = 4  # indices; fewer may come in one order twice by chance
Named = tuple[str, str] | None  # a fault's kind and text
Rule = Callable[[Record, Record], Named]


class Habits:
    """Gathers what no event has for itself; `facts` are those of the first step.

    dropout: a digest of the generator when the first dropout of a training step was called; "" without any.
    """

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {"dropout": ""}
        self._training: set[int] = set()  # the ids of batch norms that were called to be trained
        self._evaluating = False

    def called(self, module: nn.Module, *, outermost: bool, first_step: bool) -> bool:
        """Return whether this is a batch norm that learns from an evaluation, and is trained as well."""
        if outermost:
            self._evaluating = not torch.is_grad_enabled()
        if first_step and not self._evaluating and isinstance(module, DROPOUTS) and module.training and module.p > 0:
            self.facts["dropout"] = self.facts["dropout"] or _digest()
        if not (isinstance(module, BATCH_NORMS) and module.training and module.track_running_stats):
            return False
        if not self._evaluating:
            self._training.add(id(module))
        return self._evaluating and id(module) in self._training


def _digest() -> str:
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state() for _ in range(torch.cuda.is_initialized()))]
    return hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()


def is_reordered(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's order is another in each epoch, if the program says so by `set_epoch`."""
    return any(hasattr(sampler, "set_epoch") for sampler in (loader.sampler, loader.batch_sampler))


def whole_gradients(parameters: Iterable[Tensor]) -> bool:
    """Return whether a gradient has another shape than its parameter: FSDP1's, that was never reduced and sharded."""
    return any(one.grad is not None and one.grad.shape != one.shape for one in parameters)


def stale(module: nn.Module) -> bool:
    """Return whether a unit of FSDP1 still has values that it gathered before its shards were changed."""
    handle: Any = module._handle if isinstance(module, FullyShardedDataParallel) else None
    own = getattr(handle and handle.flat_param, "_local_shard", None)  # from the first forward on
    if own is None or not handle.uses_sharded_strategy or handle.needs_unshard():
        return False
    gathered = handle._get_padded_unsharded_flat_param().chunk(handle.world_size)[handle.rank]
    return not torch.equal(gathered, own.to(gathered))


def norms_of(root: nn.Module) -> list[str]:
    """Names of the parameters of a model's norms."""
    names = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in root.named_modules()
        if isinstance(module, NORMS)
        for name, _ in module.named_parameters(recurse=False)
    ]
    return list(stripped(dict.fromkeys(names)).values())


def _unsynchronised(_: Record, several: Record) -> Named:
    why = "gradients are never synchronised: where is no_sync() left, or set_requires_gradient_sync(True) called?"
    if any(several.of(rank, "unreduced") for rank in range(len(several.ranks))):
        return "never-synchronised", f"step 1: a gradient has another shape than its shard; {why}"
    for step in range(1, several.steps + 1):
        if not any(several.parts(rank, step, "gradient") for rank in range(len(several.ranks))):
            return "never-synchronised", f"step {step}: no parameter has a gradient when the optimizer steps; {why}"
    return None


def _schedule(_: Record, several: Record) -> Named:
    for step in range(2, several.steps + 1):
        times = Counter(one["of"] for one in several.of(0, "schedule", step))
        if times and (most := max(times.values())) > 1:
            text = f"step {step}: the schedule is stepped {most} times for each step of the optimizer"
            return "schedule", f"{text}: once a microbatch?"
    return None


def _order(_: Record, several: Record) -> Named:
    """Of a loader whose order is another in each epoch: as far as the second is recorded."""
    events = several.ranks[0]
    ends = [number for number, event in enumerate(events) if event["kind"] == "epoch"]
    if not ends or not events[ends[0]]["reordered"]:
        return None
    stretches = events[: ends[0]], events[ends[0] : (*ends, None)[1]]
    first, second = (
        [row for one in stretch if one["kind"] == "data" and one["by"] == "index" for row in one["rows"]]
        for stretch in stretches
    )
    if len(second) >= SHUFFLED and second == first[: len(second)] and first != sorted(first):
        return "same-order", "the second epoch has the shuffled order of the first: call sampler.set_epoch(epoch)"
    return None


def _evaluation(_: Record, several: Record) -> Named:
    if found := several.of(0, "evaluates"):
        text = f"step {found[0]['step']}: an evaluation changes batch norm's statistics"
        return "evaluation", f"{text}: call model.eval() before it, and model.train() behind"
    return None


def _frozen(_: Record, several: Record) -> Named:
    """Of parameters that the optimizer holds; a model's average of another is moved by hand."""
    for rank in range(len(several.ranks)):
        for step in range(1, several.steps + 1):
            names = {name for one in several.of(rank, "settings", step) for name in one["frozen"]}
            before = several.parts(rank, *((step - 1, "after") if step > 1 else (1, "before"))) if names else {}
            after = several.parts(rank, step, "after") if names else {}
            if moved := sorted(name for name in names if before.get(name) != after.get(name)):
                why = (
                    "the optimizer still finds a gradient, perhaps of 0: set it to None, or leave it out of the groups"
                )
                return "frozen", f"step {step}: {moved[0]} is frozen, and moves: {why}"
    return None


def _decayed_norms(_: Record, several: Record) -> Named:
    """Only where some parameters are without decay: a program that decays all means it."""
    facts, settings = several.facts(), several.of(0, "settings", 1)
    for one in settings:
        decays = [group.get("weight_decay", 0) for group in one["groups"]]
        norms = [name for name in facts["norms"] if decays[one["of"].get(name, 0)] and name in one["of"]]
        if norms and not all(decays):
            return "decayed-norms", f"weight decay: {norms[0]} is decayed, as a norm, though other parameters aren't"
    return None


def _dropout(_: Record, several: Record) -> Named:
    states = [several.facts(rank)["dropout"] for rank in several.readers]
    if len(states) > 1 and states[0] and len(set(states)) == 1:
        return (
            "same-dropout",
            "all ranks draw the same masks in dropout: add the rank to the seed once weights are made",
        )
    return None


UNSYNCHRONISED: list[Rule] = [_unsynchronised]  # which leads to others
HABITS: list[Rule] = [_schedule, _order, _evaluation, _frozen]
NOTES: list[Rule] = [_dropout, _decayed_norms]  # one rank does the same, or most programs do so

"""Record one rank of a training program while it runs, without a change to the program.

Nothing here communicates, but for a norm that was returned sharded: a collective of the recorder's would be one more
in a program that may lack one.
"""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, DataLoader

from migration.prove.fingerprint import rows
from migration.prove.habits import Habits, is_reordered, norms_of, stale, whole_gradients
from migration.prove.parts import Cuts, Part, buffers, described, dtypes, fsdp_facts, parts, roots, split_otherwise

LOW = (torch.bfloat16, torch.float16)
PLAIN = (int, float, str, list, tuple)


class Enough(SystemExit):
    """Ends a program after its last recorded step, as if it had called sys.exit()."""


class Recorder:
    """Writes a line of JSON for each event into `folder`; each has the number of the optimizer step that it belongs to.
    A step without a gradient and without a backward before it, which makes an optimizer's state, isn't counted.

    data: what a loader gave or a model got (`by`) where gradients were wanted: `rows`, hashes of its samples; and
        `trimmed`, of samples without what may be padding. By `index`: what a loader's sampler drew.
    epoch: a loader came to its end; whether it is `reordered` in each, by a sampler's set_epoch.
    schedule: a learning rate's schedule was stepped: `of`, which.
    evaluates: batch norm that is trained also learned from an evaluation.
    unreduced: before a step a gradient had another shape than its parameter. It ends the record.
    forward: a model with parameters was called.
    moments: FSDP1 gave an optimizer's state in which one tensor stands for several.
    lost: a unit of FSDP1 was called with values that are older than its shards.
    zero: gradients were set to zero; `left`: a model did so, and some that an optimizer holds are still there.
    backward: `value`, the sum of what is passed to it; whether it is `low`, of 16 bits.
    clip: the `norm` that torch's or FSDP1's clipping returned; whether it is `low`, of gradients of 16 bits.
    state: `when` before (the first step), unclipped, gradient (before each step), after (each); `parts` by name, and
        `buffers`.
    dtypes: after the first step; `of` by name, see `parts.dtypes`.
    settings: of each parameter group before each step; `of`, the number of each parameter's group, by name; which are
        `frozen`; whether the optimizer `holds` any parameter of the models.
    facts: before the first step; the rank, the ranks, and what rules ask about.
    """

    def __init__(self, folder: Path, steps: int, cuts: Cuts | None = None, batch_times: int = 1) -> None:
        self.folder, self.steps, self.cuts, self.batch_times = folder, steps, cuts or {}, batch_times
        self.step = 1
        self._in_backward = self._in_step = self._calls = 0
        self._computed = self._makes_state = False  # a backward since the last step; a step that isn't the training's
        self._wants_data = False
        self._called: list[nn.Module] = []  # in this step by the program itself, to train them
        self._roots: list[nn.Module] = []
        self._in_use: set[int] = set()  # the ids of those of this step
        self._held: dict[tuple[nn.Module, torch.optim.Optimizer], list[Tensor]] = {}  # of each root
        self._inputs: list[tuple[Tensor, str]] = []
        self._sought: set[int] = set()  # parameters whose models have been looked for
        self._drawn: dict[int, list[list[int]]] = {}  # by the id of a batch sampler: indices not yet given
        self._random: Any = None  # the generators' state when data came
        self._outputs: dict[nn.Module, torch.dtype] = {}  # of the first step
        self._facts: dict[str, Any] = {"low": False, "shared": None, "unset": [], "draws": False, "fast": False}
        self._lines: list[str] = []
        self._hooks = ExitStack()
        self._habits = Habits()

    def write(self, kind: str, **fields: Any) -> None:
        self._lines.append(json.dumps({"kind": kind, "step": self.step, **fields}))

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        with open(self.folder / f"rank-{os.getpid()}.jsonl", "a") as out:
            out.writelines(line + "\n" for line in lines)

    def __enter__(self) -> Recorder:
        for handle in (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
        ):
            self._hooks.callback(handle.remove)
        self._around(torch.autograd, "backward", self._backward)
        self._around(nn.Module, "to_empty", self._to_empty)
        for zeroing in (torch.optim.Optimizer, nn.Module):
            self._around(zeroing, "zero_grad", self._zero)
        for clipping in (nn.utils, nn.utils.clip_grad, FullyShardedDataParallel):
            self._around(clipping, "clip_grad_norm_", self._clip)
        for saving in ("optim_state_dict", "full_optim_state_dict"):
            self._around(FullyShardedDataParallel, saving, self._saves)
        self._around(DataLoader, "__iter__", self._iterate)
        self._around(BatchSampler, "__iter__", self._draw)
        self._around(torch.optim.lr_scheduler.LRScheduler, "step", self._schedule)
        if self.batch_times > 1:
            self._around(DataLoader, "__init__", self._larger_batches)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self.flush()

    def _around(self, holder: Any, name: str, ours: Callable[..., Any]) -> None:
        theirs = getattr(holder, name)

        @functools.wraps(theirs)
        def replacement(*arguments: Any, **named: Any) -> Any:
            return ours(theirs, *arguments, **named)

        made = staticmethod(replacement) if isinstance(vars(holder)[name], staticmethod) else replacement
        self._hooks.enter_context(mock.patch.object(holder, name, made))

    def _backward(self, theirs: Any, tensors: Any, *arguments: Any, **named: Any) -> Any:
        if not self._in_backward:  # recomputation calls it from within
            for tensor in (tensors,) if isinstance(tensors, Tensor) else tensors:
                if isinstance(tensor, Tensor):  # and no edge of a graph
                    self.write("backward", value=float(tensor.detach().sum()), low=tensor.dtype in LOW)
            self._inputs.clear()
            if self.step == 1:
                self._facts["draws"] |= self._random != _generators()
        self._in_backward += 1
        self._computed = True
        try:
            return theirs(tensors, *arguments, **named)
        finally:
            self._in_backward -= 1

    def _zero(self, theirs: Any, holder: Any, *arguments: Any, **named: Any) -> Any:
        theirs(holder, *arguments, **named)
        held = [one for (root, _), parameters in self._held.items() if root is holder for one in parameters]
        self.write("zero", left=_any(held))

    def _clip(self, theirs: Any, *arguments: Any, **named: Any) -> Any:
        given, *rest = (named.pop("parameters"), *arguments) if "parameters" in named else arguments
        if not isinstance(given, (Tensor, nn.Module)):
            given = list(given)
        of = given.parameters() if isinstance(given, nn.Module) else [given] if isinstance(given, Tensor) else given
        of = list(of)
        self._find(map(id, of))
        self._state("unclipped", gradient=True)
        norm = theirs(given, *rest, **named)
        low = any(parameter.grad is not None and parameter.grad.dtype in LOW for parameter in of)
        # A sharded norm is gathered, as clipping by it has just done on each rank.
        self.write("clip", norm=float(norm.full_tensor() if isinstance(norm, DTensor) else norm), low=low)
        return norm

    def _saves(self, theirs: Any, *arguments: Any, **named: Any) -> Any:
        state = theirs(*arguments, **named)
        for of in state.get("state", {}).values():  # empty on other ranks than the first
            places = [one.data_ptr() for one in of.values() if type(one) is Tensor and one.numel()]
            if len(set(places)) < len(places):
                self.write("moments")
                break
        return state

    def _to_empty(self, theirs: Any, module: nn.Module, *arguments: Any, **named: Any) -> Any:
        """Memory that nobody has set may hold anything: here it holds NaN, or the least integer, and so it is found."""
        result, recurse = theirs(module, *arguments, **named), named.get("recurse", True)
        with torch.no_grad():
            for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
                tensor.fill_(_unset(tensor.dtype))
        return result

    def _iterate(self, theirs: Any, loader: Any) -> Any:
        # At once: it draws a seed.
        return self._recorded(theirs(loader), id(loader.batch_sampler), is_reordered(loader))

    def _schedule(self, theirs: Any, schedule: Any, *arguments: Any, **named: Any) -> Any:
        self.write("schedule", of=id(schedule))
        return theirs(schedule, *arguments, **named)

    def _draw(self, theirs: Any, sampler: BatchSampler) -> Iterator[list[int]]:
        drawn = self._drawn[id(sampler)] = []
        for batch in theirs(sampler):
            drawn.append(batch)
            yield batch

    def _recorded(self, batches: Any, sampler: int, reordered: bool) -> Iterator[Any]:
        for batch in batches:
            drawn = self._drawn.get(sampler)  # workers are ahead
            indices = drawn.pop(0) if drawn else []
            if torch.is_grad_enabled():
                self._data("loader", batch)
                if indices and all(isinstance(index, int) for index in indices):
                    self.write("data", by="index", rows=indices, trimmed=indices)
            yield batch
        if torch.is_grad_enabled():
            self.write("epoch", reordered=reordered)

    def _data(self, by: str, batch: Any) -> bool:
        found, trimmed = rows(batch), rows(batch, trimmed=True)
        if found:
            self.write("data", by=by, rows=found, trimmed=trimmed)
            if self.step == 1 and (by == "loader" or not self._drawn):
                self._random = _generators()
        return bool(found)

    def _larger_batches(
        self, theirs: Any, loader: Any, dataset: Any, batch_size: Any = 1, *more: Any, **named: Any
    ) -> None:
        times = 1 if batch_size is None or named.get("batch_sampler") is not None else self.batch_times
        theirs(loader, dataset, batch_size and batch_size * times, *more, **named)

    def _before_forward(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        self._calls += 1
        if not self._in_backward and self._habits.called(module, outermost=self._calls == 1, first_step=self.step == 1):
            self.write("evaluates")
        if not self._in_backward and stale(module):
            self.write("lost")
        self._facts["fast"] |= isinstance(module, nn.TransformerEncoderLayer) and not module.training
        training = torch.is_grad_enabled() and not self._in_backward  # where it would be recomputed
        if self._calls == 1 and training and any(one.requires_grad for one in module.parameters()):
            if not any(one is module for one in self._called):
                self._called.append(module)
                held = [*parts(module), *buffers(module)] if self.step == 1 else []
                self._facts["unset"] += [part.name for part in held if _is_unset(part.values)]
            self.write("forward")
            self._wants_data = True
        # Global hooks don't get what is given by name: then it is seen where the first module inside gets it.
        if self._wants_data and self._data("model", given):
            self._wants_data = False
        if self.step == 1 and isinstance(module, (FSDPModule, FullyShardedDataParallel)):
            for tensor in given:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    if any(one is tensor for one, _ in self._inputs):
                        self._facts["shared"] = type(module).__name__
                    self._inputs.append((tensor, type(module).__name__))

    def _after_forward(self, module: nn.Module, given: Any, output: Any) -> None:
        self._calls -= 1
        self._wants_data &= self._calls > 0
        if self.step == 1 and isinstance(output, Tensor) and torch.is_grad_enabled():
            self._outputs[module] = output.dtype
            self._facts["low"] |= output.dtype in LOW

    def _before_step(self, optimizer: torch.optim.Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._in_step += 1
        if self._in_step > 1:  # an optimizer that calls another
            return
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # torch's state dict functions make an optimizer's state by a step with gradients of zero, as others do. A
        # closure computes within the step.
        self._makes_state = not (self._computed or any(map(callable, (*given[1:], *named.values()))) or _any(held))
        if self._makes_state:
            return
        self._find(map(id, [*held, *(parameter for module in self._called for parameter in module.parameters())]))
        if self.step == 1:
            self._state("before", gradient=False)
            split = any(map(split_otherwise, self._roots))
            norms = [name for root in self._roots for name in norms_of(root)]
            held_low = [part.name for _, mine in self._each(buffers) for part in mine if part.values.dtype in LOW]
            facts = self._facts | self._habits.facts | _standing() | fsdp_facts(self._roots)
            self.write("facts", **facts, split_otherwise=split, norms=norms, low_buffers=held_low)
        if whole_gradients(held):
            self.write("unreduced")
            raise Enough(0)
        self._state("gradient", gradient=True)
        groups = [
            {key: value for key, value in group.items() if isinstance(value, PLAIN) and key != "params"}
            for group in optimizer.param_groups
        ]
        for root in self._roots:
            if (root, optimizer) not in self._held:
                own = {part.of for part in parts(root)}
                mine = [one for group in optimizer.param_groups for one in group["params"] if id(one) in own]
                self._held[root, optimizer] = mine
        holds = any(mine for (_, holder), mine in self._held.items() if holder is optimizer)
        numbers = {id(one): number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}
        still = {id(one) for root in self._roots for one in root.parameters() if not one.requires_grad}
        names = [(part.name, part.of) for _, mine in self._each(parts) for part in mine if part.of in numbers]
        of, frozen = {name: numbers[one] for name, one in names}, [name for name, one in names if one in still]
        self.write("settings", groups=groups, holds=holds, of=of, frozen=frozen)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._in_step -= 1
        if self._in_step or self._makes_state:
            return
        self._computed = False
        self._state("after", gradient=False)
        if self.step == 1:
            held = [dtypes(root, mine, self._outputs, optimizer) for root, mine in self._each(parts)]
            self.write("dtypes", of={name: row for rows_ in held for name, row in rows_.items()})
            self._outputs.clear()
        self._called.clear()
        self._in_use.clear()
        self.step += 1
        self.flush()
        if self.step > self.steps:
            raise Enough(0)

    def _find(self, parameters: Iterable[int]) -> None:
        """The models that these belong to, by their `id` and in the order of these, are in use in this step."""
        wanted = dict.fromkeys(parameters)
        if new := [one for one in wanted if one not in self._sought]:
            self._sought.update(new)
            known = set(map(id, self._roots))
            self._roots += [root for root in roots(new) if id(root) not in known]
        self._in_use |= {id(root) for root in self._roots if any(id(one) in wanted for one in root.parameters())}

    def _each(self, of: Callable[[nn.Module], Iterator[Part]]) -> Iterator[tuple[nn.Module, list[Part]]]:
        """The models in use in this step and what they hold, each under other names than those before it."""
        taken: set[str] = set()
        for number, root in enumerate((root for root in self._roots if id(root) in self._in_use), 1):
            mine = list(of(root))
            for part in mine:
                part.name += f" of model {number}" * (part.name in taken)
            taken.update(part.name for part in mine)
            yield root, mine

    def _state(self, when: str, *, gradient: bool) -> None:
        found: dict[str, list[Any]] = {}
        for part in (part for _, mine in self._each(parts) for part in mine):
            prints = described(part, part.grad if gradient else part.values, self.cuts)
            found.setdefault(part.name, []).extend(prints)
        of = () if gradient else (part for _, mine in self._each(buffers) for part in mine)
        held = {part.name: described(part, part.values, {}) for part in of}
        self.write("state", when=when, parts={name: one for name, one in found.items() if one}, buffers=held)


def _any(parameters: Iterable[Tensor]) -> bool:
    """Return whether this rank has a gradient of these that isn't zero."""
    grads = (one.grad for one in parameters if one.grad is not None)
    return any(bool((one.to_local() if isinstance(one, DTensor) else one).any()) for one in grads)


def _generators() -> Any:
    """The states of the generators that programs draw from."""
    numpys: Any = numpy.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist(), numpys[2:]


def _standing() -> dict[str, int]:
    if dist.is_initialized():
        return {"rank": dist.get_rank(), "world": dist.get_world_size()}
    return {"rank": int(os.environ.get("RANK", 0)), "world": int(os.environ.get("WORLD_SIZE", 1))}


def _unset(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).min


def _is_unset(values: Tensor) -> bool:
    if not values.numel() or values.is_meta or values.dtype in (torch.bool, torch.uint8):
        return False
    if values.dtype.is_floating_point or values.is_complex():
        return bool(values.isnan().all())
    return bool((values == torch.iinfo(values.dtype).min).all())

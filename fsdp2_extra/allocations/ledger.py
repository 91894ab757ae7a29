"""Every tensor that a rank allocates: how many bytes, from when to when, for what.

A dispatch mode sees each operation's results, so this works where an allocator keeps no history, on the CPU. Storages
are counted, not tensors: a view costs nothing, and FSDP keeps a parameter's tensor while it frees the memory behind
it. What an allocation was for is often known later only: a tensor made in forward is an activation if it is still
there when backward begins, a tensor made in backward is a gradient if a parameter has it in the end.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # what `redistribute` may give
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = (
    "parameters",  # this rank's shards, or its copy
    "gathered parameters",  # whole ones, for as long as a group computes
    "gradients",
    "optimizer",
    "buffers",
    "activations",  # made in forward, and still there when backward begins
    "communication",  # handed to a collective, and none of the above
    "data",
    "temporary",
    "before",  # allocated before recording began, so that nobody knows what for
)


MAX_ENTRIES = 100_000
WRAPPERS = (DTensor, AsyncCollectiveTensor)  # of other tensors, whose memory is what counts


@dataclass(slots=True)
class Allocation:
    """A stretch of memory. Times are seconds since the ledger was opened; `died` is None for what outlived it."""

    bytes: int
    born: float
    phase: int  # index into the ledger's phases
    module: str
    operation: str
    kind: str | None = None
    died: float | None = None
    last_phase: int | None = None


@dataclass(slots=True)
class Phase:
    """A part of a step, and when it began, in seconds."""

    name: str  # data, forward, backward, optimizer, evaluation, checkpoint, full model
    step: int
    began: float


@dataclass(slots=True)
class Collective:
    """An exchange between ranks, and the bytes that this rank gave or got: the larger."""

    name: str  # such as "all-gather", or "all-gather over tp" on a mesh of several dimensions
    bytes: int
    step: int


# Each exchange has several names in torch: of the process group's operations, with lists of tensors and without, and
# of the functional ones. What else is in their namespaces moves no data.
EXCHANGES = {
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "broadcast": "broadcast",
    "alltoall": "all-to-all",
    "scatter": "scatter",
    "gather": "gather",
}


def exchange(operation: str) -> str | None:
    """The field's name for an operation of `c10d`, such as `_allgather_base_.default`; None if it is no exchange."""
    plain = operation.partition(".")[0].strip("_").replace("all_", "all")
    return next((name for start, name in EXCHANGES.items() if plain.startswith(start)), None)


def group_of(values: Iterable[Any]) -> dist.ProcessGroup | None:
    """The process group among the arguments of an operation of `c10d`; None if there is none.

    A functional one gives the group's name as its last text, of which torch has no public reader
    (`tests/test_dimensions.py::test_what_travels_in_a_step`).
    """
    values = list(values)
    for value in values:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    names: list[Any] = [value for value in values if isinstance(value, str)]
    return dist.distributed_c10d._resolve_process_group(names[-1]) if names else None


def dimension_of(values: Iterable[Any]) -> str:
    """A suffix such as " over tp" for a collective of one of a mesh's dimensions; "" where its group is all ranks'."""
    group = group_of(values)
    kind, _, dimension = (group.group_desc if group else "").partition("_")
    return f" over {dimension}" if kind == "mesh" else ""


@functools.cache
def name_of(func: Any) -> tuple[str, str]:
    """The namespace and the name of an operator."""
    return tuple(str(func).split(".")[:2])  # type: ignore[return-value]


class MemoryLimitReached(torch.OutOfMemoryError):
    """Tensors take more than the limit that was set. An out-of-memory error like a device's own."""


@dataclass(eq=False)
class Ledger(TorchDispatchMode):
    """Counts while it is entered. `mark` and `phase` tell it what it can't see."""

    allocations: list[Allocation] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    live_bytes: int = 0
    peak_bytes: int = 0
    peak_at: float = 0.0
    complete_from: float = 0.0  # what was freed before this moment is left out, but for what was alive at the peak
    limit: int | None = None  # raise MemoryLimitReached beyond so many bytes
    fake: bool = False  # count fake tensors, whose storages are on meta

    def __post_init__(self) -> None:
        super().__init__()
        self._began = time.perf_counter()
        # By the identity of the storage object, which torch keeps for as long as the memory behind it.
        self._live: dict[int, tuple[weakref.ref[Any], Allocation]] = {}
        self._modules: list[str] = []
        self._names: dict[int, str] = {}
        self._reduced = 0  # bytes of the last reduce-scatter, until gloo's copy of them was seen
        self._copy: int | None = None  # the key of that copy while it is in use
        self.phase("start", 0)

    # --- what it is told -----------------------------------------------------------------------------------

    def phase(self, name: str, step: int) -> None:
        """From now on the rank does this."""
        self.phases.append(Phase(name, step, self._now()))

    @torch.no_grad()  # a DTensor then gives its local tensor as it is, and no view of it
    def mark(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Say what tensors are for, in hindsight too: it holds for as long as their memory has existed."""
        for tensor in tensors:
            allocation = self._note(tensor, "")
            if allocation is not None:
                allocation.kind = kind

    def watch(self, model: nn.Module, held: Mapping[str, Iterable[Tensor]]) -> None:
        """Count what there is already, by kind, and name the module in whose forward a tensor is made."""
        self._names = {id(module): name for name, module in model.named_modules()}
        for kind, tensors in held.items():
            self.mark(kind, tensors)

    def alive(self) -> list[Allocation]:
        """List the present allocations, each with the kind that it has if nothing more is known of it."""
        there = [allocation for _, allocation in self._live.values()]
        return [replace(a, kind=a.kind or kind_of(a, self.phases)) for a in there]

    # --- what it sees --------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, WRAPPERS) for kind in types):
            return NotImplemented  # let it become the operations on its local tensors, and their collectives
        if self._copy is not None:
            self._end_copy(args)
        result = self._compute(func, args, kwargs or {})
        namespace, operation = name_of(func)
        for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor, operation)
                if self._reduced:
                    self._find_copy(func, tensor)
        if namespace in ("c10d", "_c10d_functional"):
            name = exchange(operation)
            if name is not None:
                self._collective(name, operation, [*args, *(kwargs or {}).values(), result])
        return result

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def _collective(self, name: str, operation: str, values: Sequence[Any]) -> None:
        over = dimension_of(values)
        # Each argument by itself: a list of outputs is one exchange, of which the input may be a part.
        groups = [[leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in values]
        for tensor in (tensor for group in groups for tensor in group):
            allocation = self._note(tensor, operation)
            if allocation is not None and allocation.kind is None:
                allocation.kind, allocation.operation = "communication", operation + over
        largest = max(sum(tensor.numel() * tensor.element_size() for tensor in group) for group in groups)
        self.collectives.append(Collective(name + over, largest, self.phases[-1].step))
        self._reduced = largest if name == "reduce-scatter" else 0

    def _find_copy(self, func: Any, tensor: Tensor) -> None:
        """gloo reduces in a copy of its input, which only a view of it shows, once the exchange is over."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._live:
            return  # a shape without memory, by which DTensor learns how a result is sharded
        new = self._live[id(storage)][1]
        fresh = new is self.allocations[-1] and new.kind is None
        if fresh and new.bytes == self._reduced and getattr(func, "is_view", False):
            new.kind, self._copy, self._reduced = "communication", id(storage), 0

    def _end_copy(self, args: Any) -> None:
        """End gloo's copy at its last use.

        gloo's thread drops it then. But this mode has given the copy a Python object, and to destroy that the thread
        waits for the interpreter's lock: milliseconds, which a run without a ledger doesn't take.
        """
        leaves = (leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.layout is torch.strided)
        if self._copy is not None and not any(id(leaf.untyped_storage()) == self._copy for leaf in leaves):
            self._end(self._live.pop(self._copy)[1])
            self._copy = None

    def _note(self, tensor: Tensor, operation: str) -> Allocation | None:
        """The allocation behind a tensor, entered if it is new; None if it has no memory of its own."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.elem
        if tensor.layout is not torch.strided:
            return None  # a sparse tensor has no storage: its indices and values, tensors themselves, are what counts
        storage = tensor.untyped_storage()
        known = self._live.get(id(storage))
        if known is not None and known[0]() is storage:
            return known[1]
        return self._enter(storage, operation)

    def _enter(self, storage: torch.UntypedStorage, operation: str, kind: str | None = None) -> Allocation | None:
        if storage.device.type == "meta" and not self.fake:
            return None
        module = self._modules[-1] if self._modules else ""
        new = Allocation(storage.nbytes(), self._now(), len(self.phases) - 1, module, operation, kind)
        self.allocations.append(new)
        self.live_bytes += new.bytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_at = self.live_bytes, new.born
        if len(self.allocations) > 2 * MAX_ENTRIES:
            # Keep the newest entries, what is alive, and what was alive at the peak.
            older, newer = self.allocations[:-MAX_ENTRIES], self.allocations[-MAX_ENTRIES:]
            kept = [a for a in older if a.died is None or a.born <= self.peak_at < a.died]
            self.allocations, self.complete_from = kept + newer, newer[0].born
        key = id(storage)
        self._live[key] = (weakref.ref(storage, lambda _: self._freed(key)), new)
        if self.limit is not None and self.live_bytes > self.limit:
            limit, self.limit = self.limit, None  # once: what ends the run may need memory too
            raise MemoryLimitReached(
                f"--memory-limit {limit}: {self.live_bytes} bytes of tensors with the {new.bytes} of {operation}"
                + (f" in {module}" if module else "")
            )
        return new

    def _freed(self, key: int) -> None:
        if key == self._copy:
            self._copy = None
        self._end(self._live.pop(key)[1])

    def _end(self, allocation: Allocation) -> None:
        allocation.died, allocation.last_phase = self._now(), len(self.phases) - 1
        self.live_bytes -= allocation.bytes

    def _resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """FSDP frees and allocates the memory of a gathered parameter behind its tensor's back."""
        if storage.nbytes() == before:
            return
        known = self._live.pop(id(storage), None)
        if known is not None:
            if known[1].kind != "parameters":
                known[1].kind = "gathered parameters"
            self._end(known[1])
        self._enter(storage, "resize", "gathered parameters")

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def __enter__(self) -> Ledger:
        self._patched = patched_resize(self)
        self._patched.__enter__()
        self._hooks = [
            nn.modules.module.register_module_forward_pre_hook(self._into),
            nn.modules.module.register_module_forward_hook(self._out_of, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._patched.__exit__(None, None, None)
        for allocation in self.allocations:  # of those that nobody has marked
            allocation.kind = allocation.kind or kind_of(allocation, self.phases)

    def _into(self, module: nn.Module, inputs: Any) -> None:
        self._modules.append(self._names.get(id(module), type(module).__name__))

    def _out_of(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._modules.pop()


def kind_of(allocation: Allocation, phases: Sequence[Phase]) -> str:
    """Name an allocation's purpose, by the phase that made it and whether a later one still had it."""
    phase = phases[allocation.phase].name
    if phase == "data":
        return "data"
    outlived = allocation.last_phase is None or allocation.last_phase > allocation.phase
    return "activations" if phase == "forward" and outlived else "temporary"


def by_kind(allocations: Iterable[Allocation]) -> dict[str, int]:
    """Bytes of each kind that there is, in the order of KINDS."""
    sizes = dict.fromkeys(KINDS, 0)
    for allocation in allocations:
        sizes[allocation.kind or "temporary"] += allocation.bytes
    return {kind: count for kind, count in sizes.items() if count}


@contextmanager
def patched_resize(ledger: Ledger) -> Iterator[None]:
    """Tell the ledger of `UntypedStorage.resize_`, which is no operation and so passes a dispatch mode by."""
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size)
        ledger._resized(storage, before)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        # It is inherited: without an own attribute the class has the original again.
        del torch.UntypedStorage.resize_


def enclosing(module: str, blocks: Container[str]) -> str:
    """The name of the block that a module is or lies in; empty if it is in none."""
    while module and module not in blocks:
        module = module.rpartition(".")[0]
    return module

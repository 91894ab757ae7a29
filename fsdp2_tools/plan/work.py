"""The computation and traffic of each operator of a step, and a GPU's time for them.

FLOPs are those of `torch.utils.flop_counter`, bytes those of the tensors that an operator reads and writes. A GPU takes
the longer of the two at the rates of its table: the roofline of https://doi.org/10.1145/1498765.1498785.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from fsdp2_extra.allocations.ledger import exchange, group_of, name_of
from fsdp2_tools.plan.speed import Speed

MATRIX, ATTENTION, MEMORY = "matrix", "attention", "memory"
# The parts of FSDP2's exchanges, each on a stream of its own or on that of the computation: see schedule.py.
COMPUTE, COPY_IN, COPY_OUT, REDUCE_IN = "compute", "copy-in", "copy-out", "reduce-in"
OF_FSDP = {"all_gather_copy_in": COPY_IN, "split_with_sizes_copy": COPY_OUT, "chunk_cat": REDUCE_IN}
NOTHING = ("prim", "profiler")  # namespaces of operators that ask for a property or mark a moment
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "_local_scalar_dense", "record_stream", "set_"}
# These read as much as they write, and not the whole of a table or of the log-probabilities.
LOOKED_UP = {"embedding", "nll_loss_forward", "gather", "index", "index_select"}
KERNEL = 2e-6  # seconds: the least that a kernel takes, assumed
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class Work:
    """One operator.

    Attributes:
        role: COMPUTE, a part of FSDP2's exchanges, or the name of a collective.
        kind: MATRIX, ATTENTION or MEMORY: which rate bounds it.
        flops: as a GPU computes them, so half of a causal attention; `full` counts it whole, as an MFU does.
        bytes: read and written; of a collective those of its larger side.
        ranks: of a collective, how many take part and how far they stand from each other.
        awaited: of a collective, whether the computation waits for it where it is issued, as between parts of layers.
    """

    role: str
    kind: str
    flops: int
    full: int
    bytes: int
    dtype: str
    module: str
    phase: int
    ranks: tuple[int, int] = (1, 1)
    awaited: bool = False

    def seconds(self, speed: Speed) -> float:
        """Of an operator that is no collective."""
        by_memory = self.bytes / (speed.memory * speed.efficiency["memory"])
        if self.kind == MEMORY:
            return max(by_memory, KERNEL)
        return max(self.flops / (speed.flops[self.dtype] * speed.efficiency[self.kind]), by_memory, KERNEL)


class Watch:
    """Writes down the operators that a ledger dispatches, in the order in which the CPU issues them."""

    def __init__(self) -> None:
        self.done: list[Work] = []
        self.flattens = False  # whether the last one did

    def note(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, module: str, phase: int
    ) -> None:
        """One operator, after it ran."""
        namespace, name = name_of(func)
        if namespace in NOTHING or name in NO_KERNEL or func.is_view or name.endswith("_unsafe_view"):
            return
        if namespace in ("c10d", "_c10d_functional"):
            collective = exchange(name)
            if collective is not None:
                awaited = collective == "all-to-all" or namespace != "c10d"  # FSDP2 and the loop call c10d's
                self._collective(collective, [*args, *kwargs.values(), result], module, phase, awaited)
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        # What is written in place stands among the arguments, and is read too or written once more.
        written = made or (tensors if name.startswith("_") else [])
        role = COMPUTE
        if namespace == "fsdp":
            role = next((part for start, part in OF_FSDP.items() if name.startswith(start)), COMPUTE)
        count = 2 * _bytes(made) if name in LOOKED_UP else _bytes(tensors) + _bytes(written)
        if role == COPY_IN:
            count = 2 * _bytes(args[0])  # it returns the whole buffer, of which it writes this rank's part
            if self.flattens:
                self.done.pop()  # the shards are cast into one tensor just before, on the same stream
        kind, flops, full = self._flops(func, name, args, kwargs, result)
        dtype = DTYPES.get(tensors[0].dtype, "fp32") if tensors else "fp32"
        self.flattens = name == "_foreach_copy_"
        self.done.append(Work(role, kind, flops, full, count, dtype, module, phase))

    def _collective(self, name: str, values: Sequence[Any], module: str, phase: int, awaited: bool) -> None:
        sizes = [_bytes([leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]) for value in values]
        self.done.append(Work(name, MEMORY, 0, 0, max(sizes), "", module, phase, _ranks(values), awaited))

    def _flops(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> tuple[str, int, int]:
        if name.startswith("_scaled_dot_product"):
            backward = "backward" in name
            first = 1 if backward else 0  # the gradient comes first
            query, key, value = (tensor.shape for tensor in args[first : first + 3])
            heads = query[:2]  # a key that serves several queries is computed with for each
            full = sdpa_flop_count(query, (*heads, *key[2:]), (*heads, *value[2:]))
            # Backward makes four products of forward's two, and a flash kernel its scores once more.
            full = full * 5 // 2 if backward else full
            # transformers gives the causal mask itself where tensors have no values, and leaves it to the kernel else.
            masked = any(_is_mask(argument, query[2]) for argument in (*args[first + 3 :], *kwargs.values()))
            is_causal = masked or any(argument is True for argument in (*args, *kwargs.values()))
            return ATTENTION, full // 2 if is_causal else full, full
        packet = func._overloadpacket
        if packet not in flop_registry:
            return MEMORY, 0, 0
        flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
        return MATRIX, flops, flops


def _is_mask(value: Any, length: int) -> bool:
    """Return whether an argument of attention has a place for each pair of a query and a key."""
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[-2:] == (length, length)


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes that tensors move; of an expanded one its memory."""
    return sum(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) for tensor in tensors)


def _ranks(values: Sequence[Any]) -> tuple[int, int]:
    """The number of ranks of a collective and their distance, by the group among its arguments."""
    group = group_of(values)
    if group is None:
        return dist.get_world_size(), 1
    there = dist.get_process_group_ranks(group)
    return len(there), there[1] - there[0] if len(there) > 1 else 1

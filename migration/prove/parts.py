"""Each rank's part of each tensor of a model, by the tensor's original name."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor

from fsdp1_interface.gradients import parameters_of
from migration.checkpoints.names import ANYWHERE, IN_FRONT, stripped
from migration.prove import fingerprint

COLUMNS = ("stored", "computed", "reduced", "optimizer")  # the dtypes that a parameter and its gradient go through
KEEPS_GATHERED = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
Cuts = dict[str, list[tuple[int, int]]]


@dataclass
class Part:
    """Values, flat, and their places in the flat whole tensor. `grad` is the gradient at the same places, if any.

    `of` is the `id` of the parameter, as an optimizer may hold it.
    """

    name: str
    of: int
    values: Tensor
    index: Tensor
    grad: Tensor | None


def roots(parameters: Sequence[int]) -> list[nn.Module]:
    """The outermost modules that hold any of these parameters, by their `id` and in their order.

    Found without asking the program.
    """
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and "_modules" in one.__dict__]
    inner = {id(child) for module in modules for child in module._modules.values()}
    order = {parameter: place for place, parameter in enumerate(parameters)}
    found = []
    for module in modules:
        if id(module) not in inner and (held := order.keys() & map(id, module.parameters())):
            found.append((min(map(order.__getitem__, held)), module))
    return [module for _, module in sorted(found, key=lambda pair: pair[0])]


def parts(root: nn.Module) -> Iterator[Part]:
    """Of the parameters of a model: FSDP1's, FSDP2's, DDP's or plain ones."""
    found = list(_raw(root))
    names = stripped(dict.fromkeys(part.name for part in found))
    for part in found:
        part.name = names[part.name]
        yield part


def _raw(root: nn.Module) -> Iterator[Part]:
    done: set[int] = set()
    for prefix, module in root.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            yield from _of_flat_parameter(f"{prefix}." if prefix else "", module, done)
    for name, parameter in root.named_parameters():
        if id(parameter) not in done:
            yield _whole_or_sharded(name, parameter)


def _of_flat_parameter(prefix: str, unit: FullyShardedDataParallel, done: set[int]) -> Iterator[Part]:
    """The pieces of original parameters in a unit's flat parameter.

    FSDP1 says nowhere in public which values of a flat parameter are whose without gathering it, which would be a
    collective in the midst of somebody's program: `_handle.flat_param` and its `_fqns`, `_params`, `_shard_param_infos`
    and `_local_shard` do.
    """
    if unit._handle is None:
        return
    flat: Any = unit._handle.flat_param
    done.add(id(flat))
    local = getattr(flat, "_local_shard", flat.data)  # the former from the first forward on, where it is sharded
    originals = flat._params if unit._handle._use_orig_params else None
    done.update(map(id, originals or ()))
    for number, (name, info) in enumerate(zip(flat._fqns, flat._shard_param_infos, strict=True)):
        if not info.in_shard:
            continue
        place = slice(info.offset_in_shard, info.offset_in_shard + info.numel_in_shard)
        grad = flat.grad[place] if originals is None and flat.grad is not None else None
        if originals is not None and originals[number].grad is not None:
            grad = originals[number].grad.flatten()
        index = torch.arange(info.intra_param_start_idx, info.intra_param_end_idx + 1)
        yield Part(prefix + name, id(originals[number] if originals else flat), local[place], index, grad)


def _whole_or_sharded(name: str, tensor: Tensor) -> Part:
    grad = tensor.grad
    if isinstance(tensor, DTensor):
        (chunk,) = tensor.__create_chunk_list__()  # what torch's own checkpoints go by
        index = torch.zeros((), dtype=torch.int64)
        strides = torch.empty(tensor.shape, device="meta").stride()
        for size, offset, stride in zip(chunk.sizes, chunk.offsets, strides, strict=True):
            index = index.unsqueeze(-1) + (torch.arange(size) + offset) * stride
        local = tensor.to_local()
        # A gradient that is still a part of a sum on each rank is added up, as the optimizer does next: a collective,
        # of all ranks that split the layer.
        placed = grad.redistribute(placements=tensor.placements) if isinstance(grad, DTensor) else None
        grad = None if placed is None else placed.to_local()
        return Part(name, id(tensor), local.flatten(), index.flatten(), None if grad is None else grad.flatten())
    return Part(
        name, id(tensor), tensor.flatten(), torch.arange(tensor.numel()), None if grad is None else grad.flatten()
    )


def fsdp_facts(roots: list[nn.Module]) -> dict[str, bool]:
    """Find out if there are units of FSDP1, groups of FSDP2, and kinds of units in which FSDP1 is wrong itself.

    `keeps_gathered`: SHARD_GRAD_OP with `use_orig_params`. `apart`: replicas of shards of one rank, which take it for
    NO_SHARD within that rank. Of these only `use_orig_params` isn't public.
    """
    units = [unit for root in roots for unit in FullyShardedDataParallel.fsdp_modules(root)]
    alone = ShardingStrategy.NO_SHARD
    return {
        "fsdp1": bool(units),
        "fsdp2": any(isinstance(module, FSDPModule) for root in roots for module in root.modules()),
        "keeps_gathered": any(unit.sharding_strategy in KEEPS_GATHERED and unit._use_orig_params for unit in units),
        "apart": any(
            unit.sharding_strategy is alone and dist.get_world_size(unit.process_group) < dist.get_world_size()
            for unit in units
        ),
    }


def split_otherwise(root: nn.Module) -> bool:
    """Return whether parameters are sharded by more than data parallelism, whose ranks share their samples."""
    sharded = [parameter for parameter in root.parameters() if isinstance(parameter, DTensor)]
    by_data = any(isinstance(module, FSDPModule) for module in root.modules())
    return any(sum(one.is_shard() for one in p.placements) > int(by_data) for p in sharded)


def buffers(root: nn.Module) -> Iterator[Part]:
    found = {name: _whole_or_sharded(name, buffer) for name, buffer in root.named_buffers() if not buffer.is_meta}
    for name, plain in stripped(found).items():
        found[name].name = plain
        yield found[name]


def described(part: Part, values: Tensor | None, cuts: Cuts) -> list[dict[str, Any]]:
    """Prints of a part, cut as another run's ranks hold it: dictionaries of `place`, `hash`, `square`, `sketch`.

    A place is the first and the last index; of values that lie apart, their number as well.
    """
    if values is None or not values.numel() or values.is_complex():
        return []
    index, found = part.index, []
    values = values.detach().cpu()
    known = [range(*cut) for cut in cuts.get(part.name, []) if cut[1] <= len(index)]
    covered = sum(map(len, known)) == len(index) == int(index[-1]) + 1
    for cut in known if covered else [range(len(index))]:
        taken = slice(cut.start, cut.stop)
        place = [int(index[taken][0]), int(index[taken][-1]), len(cut)]
        found.append({"place": place, **asdict(fingerprint.of(values[taken], index[taken]))})
    return found


def dtypes(
    root: nn.Module, held: Iterable[Part], outputs: Mapping[nn.Module, torch.dtype], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, str]]:
    """Of each of a model's parameters the dtypes by `COLUMNS`, without `torch.`; - where there is none.

    stored: as the rank keeps it between steps, which is what `state_dict()` has, and so a checkpoint.
    computed: of what the module that holds it gives, or the next one around it that is called as a module.
    reduced: what FSDP1 or FSDP2 sum gradients in; without them as the gradient itself.
    optimizer: of its state, but for counters.
    """
    by_name: dict[str, torch.dtype] = {}
    for name, module in root.named_modules():  # of a wrapper and what is in it the latter comes last
        if module in outputs:
            plain = ".".join(word for word in name.split(".") if word not in ANYWHERE)
            by_name |= dict.fromkeys((plain, plain.removeprefix(f"{IN_FRONT}.")), outputs[module])
    reduced, states = _reduced(root), {id(one): state for one, state in optimizer.state.items()}
    found = {}
    for part in held:
        holder = part.name.rpartition(".")[0]
        while holder and holder not in by_name:
            holder = holder.rpartition(".")[0]
        kept = [value for value in states.get(part.of, {}).values() if isinstance(value, Tensor) and value.dim()]
        row = [
            [part.values.dtype],
            [by_name[holder]] if holder in by_name else [],
            [reduced.get(part.of) or part.values.dtype] if part.grad is not None or part.of in reduced else [],
            [value.dtype for value in kept],
        ]
        words = [", ".join(sorted({str(one).removeprefix("torch.") for one in some})) or "-" for some in row]
        found[part.name] = dict(zip(COLUMNS, words, strict=True))
    return found


def _reduced(root: nn.Module) -> dict[int, torch.dtype | None]:
    """By the `id` of a parameter; None = its own. The innermost unit that holds it decides."""
    found: dict[int, torch.dtype | None] = {}
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        dtype = unit.mixed_precision.reduce_dtype or unit.mixed_precision.param_dtype
        found.update((id(parameter), dtype) for parameter in unit.parameters())
    for module in root.modules():
        for own in parameters_of(module):  # whose own dtypes are set by the first forward
            found[id(own.sharded_param)] = own.mp_policy.reduce_dtype or own.mp_policy.param_dtype
    return found

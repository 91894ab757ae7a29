"""The dtypes that a parameter and its gradient go through, read off a program that has made a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp1_interface.gradients import parameters_of
from migration.checkpoints.names import ANYWHERE, IN_FRONT
from migration.prove.parts import Part

COLUMNS = ("stored", "computed", "reduced", "optimizer")


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
        found.update((id(own.sharded_param), own.reduce_dtype or own.param_dtype) for own in parameters_of(module))
    return found

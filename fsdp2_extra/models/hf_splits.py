"""Tensor parallelism of a model of transformers: by its own plan, `_tp_plan`, in styles of torch.

    colwise, rowwise       a rank has rows of a weight, then columns of the next: its heads, its hidden numbers
    colwise_gather_output, rowwise_split_input         the same, and what travels between the two is whole
    packed_colwise         a gate and an up in one weight, of each of which a rank has its part
    moe_tp_experts         a rank has a part of each expert, and the ranks' parts are summed
    replicated_with_grad_allreduce       a norm of heads, which has a gradient of a rank's own heads
    nothing                computed on each rank as always, since between layers activations are whole

Source: transformers/distributed/tensor_parallel.py, which has these names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from fsdp2.models.locally import OF_SOME_HEADS, WHOLE, Change, Locally, Read, gathered, in_parts, packed, part, summed
from fsdp2_extra.models.partial_activations import seen_in_part

Plan = Mapping[str, str]

# By a configuration's type, plans with which a model computes something else, or nothing. `tests/others/splits.py`
# finds them: it tries each architecture. Shapes don't tell.
UNFIT = {
    "gemma3n_text": "its layers take a mean of all hidden numbers, and a rank has some",
    **dict.fromkeys(("inkling_text", "inkling2_text"), "it gives one rank an expert's gate, and another the up"),
    "llama4_text": "its layers add in place to what another one gives",
}

LINEAR: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), lambda: ColwiseParallel(output_layouts=Replicate())),
    "rowwise": RowwiseParallel,
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep"), lambda: RowwiseParallel(input_layouts=Replicate())),
}
# Of parameters that have a rule of their own, such as the experts' in one tensor, by their number of dimensions.
PARAMETERS: Mapping[str, Callable[[int], Read]] = {
    "colwise": lambda dims: part(max(dims - 2, 0)),
    "rowwise": lambda dims: part(dims - 1),
    "packed_colwise": lambda dims: packed(max(dims - 2, 0)),
    "packed_rowwise": lambda dims: packed(dims - 1),
    "replicate": lambda dims: WHOLE,
}
# Of the parameters of modules that aren't linear layers. What the plan doesn't name is whole.
MODULES: Mapping[str, Read] = {
    **dict.fromkeys(("", "local_params", "replicate", "all_reduce", "mla_kv_a_proj", "moe_identity_expert"), WHOLE),
    "replicated_with_grad_allreduce": OF_SOME_HEADS,
    "embedding_rowwise": gathered(0),
    "embedding_colwise": gathered(1),
}


def plan_of(model: Any, fails: Callable[[nn.Module], str | None]) -> Mapping[str, ParallelStyle]:
    """Names of modules -> styles: of each that has parameters, and of those around which something travels.

    The model, on meta, stays as it is; for `fails` see `seen_in_part`. Raises ValueError, in a line, for a model
    without a plan, and for what can't be split as its plan says.
    """
    rules = _rules(model)
    _require_fit(model.config.get_text_config(), rules)
    modules = dict(model.named_modules())
    styles = {name: _style(model, name, module, rules) for name, module in modules.items()}

    common = math.gcd(*sizes_of(model).values())
    ranks = next((n for n in range(2, common + 1) if common % n == 0), 1)  # as few as any
    cuts = {name: _cut(style, modules[name]) for name, style in styles.items()}
    for name in seen_in_part(model, cuts, ranks, fails):
        if isinstance(style := styles[name], Locally):
            style.reads = dict.fromkeys(_own_parameters(modules[name]), OF_SOME_HEADS) | style.reads

    for name, module in modules.items():
        read = getattr(styles[name], "reads", {})
        unread = [own for own, one in _own_parameters(module).items() if one.requires_grad and own not in read]
        if unread and any(cuts.get(f"{name}.{child}") for child, _ in module.named_children() if name):
            raise ValueError(f"its plan splits layers of {name}, and says nothing of {', '.join(unread)}")
    return {
        name: one for name, one in styles.items() if _own_parameters(modules[name]) or getattr(one, "travels", True)
    }


def _require_fit(config: Any, rules: Plan) -> None:
    """Raise ValueError, in a line, for a configuration with which a split model computes something else."""
    if (why := UNFIT.get(config.model_type)) is not None:
        raise ValueError(f"transformers' plan doesn't fit it: {why}")
    for name, value in config.to_dict().items() if _splits_heads(rules) else ():
        if re.search("(att|activation).*drop", name) and value:
            raise ValueError(f"{name} is above 0, and ranks would drop the same of other heads; set it to 0")
        if name == "clip_qkv" and value is not None:
            raise ValueError("clip_qkv has it change in place what another layer gives, which no split layer takes")


def _cut(style: ParallelStyle, module: nn.Module) -> Mapping[str, int]:
    """The parameters of which a rank computes with a part, and of which dimension."""
    if isinstance(style, Locally):
        return {own: dim for own, read in style.reads.items() if (dim := read.cut) is not None}
    if isinstance(style, ColwiseParallel):
        return dict.fromkeys(_own_parameters(module), 0) if style.output_layouts == (Shard(-1),) else {}
    return {"weight": 1} if cast(RowwiseParallel, style).input_layouts == (Shard(-1),) else {}


def sizes_of(model: Any) -> Mapping[str, int]:
    """The numbers that the ranks must divide, by their names. Raises ValueError as `plan_of` does."""
    rules, sizes = _rules(model), dict[str, int]()
    for name, module in model.named_modules():
        style, last = _style(model, name, module, rules), ".".join(_generic(name).split(".")[-2:])
        if isinstance(style, Locally):
            for own, read in style.reads.items():
                if isinstance(read.placement, Shard):
                    size = module.get_parameter(own).shape[read.placement.dim]
                    sizes[f"{last}.{own}"] = size // (1 if read.packed is None else 2)
        else:
            sizes[last] = module.out_features if isinstance(style, ColwiseParallel) else module.in_features
    for name, value in model.config.get_text_config().to_dict().items() if _splits_heads(rules) else ():
        if re.fullmatch(r"(\w+_)?num_(\w+_)?(attention|key_value|kv)_heads", name) and value:
            sizes[name] = math.gcd(*value) if isinstance(value, list) else value  # of each layer
    return sizes


def _rules(model: Any) -> Plan:
    """The plan, of names with `*` for numbers; what shares the weight of a layer that is split is in it too."""
    rules = dict(getattr(model, "_tp_plan", None) or {})
    if not any("*" in name for name in rules):
        raise ValueError(f"transformers has no plan for splitting the layers of {type(model).__name__}")
    names: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, set()).add(_generic(name.rpartition(".")[0]))
    for tied in names.values():
        found = {rules.get(name, "") for name in tied}
        if len(found) > 1 and all(rule.startswith(("colwise", "embedding_rowwise")) for rule in found - {""}):
            rules |= dict.fromkeys(tied - rules.keys(), "embedding_rowwise")
        elif len(found) > 1:
            raise ValueError(f"its plan splits {' and '.join(sorted(tied))}, which share a weight, in different ways")
    return rules


def _style(model: Any, name: str, module: nn.Module, rules: Plan) -> ParallelStyle:
    generic = _generic(name)
    rule = rules.get(generic, "")
    if rule in LINEAR and isinstance(module, nn.Linear):
        return LINEAR[rule]()
    reads = {}
    for own, parameter in _own_parameters(module).items():
        own_rule = rules.get(f"{generic}.{own}", "")
        read = PARAMETERS[own_rule](parameter.dim()) if own_rule in PARAMETERS else MODULES.get(own_rule or rule)
        if read is None:
            raise ValueError(f"its plan has {own_rule or rule} for {name}.{own}, which isn't translated")
        if read is not WHOLE:
            reads[own] = read
    between: dict[str, tuple[Change | None, Change | None]] = {
        "moe_tp_experts": (in_parts, summed),
        "moe_identity_expert": (lambda x, mesh: x / mesh.size(), None),  # the ranks' sum is what one would give
        "all_reduce": (None, summed),
        "mla_kv_a_proj": (None, _rotary_in_parts(model)),
    }
    if rule not in MODULES and rule not in between:
        raise ValueError(f"its plan has {rule} for {name}, which isn't translated")
    return Locally(reads, *between.get(rule, (None, None)))


def _rotary_in_parts(model: Any) -> Change:
    """Of latent attention: the rotary part goes to this rank's heads, and the rest through layers of the plan."""
    width = getattr(model.config.get_text_config(), "qk_rope_head_dim", 0)

    def change(x: Tensor, mesh: DeviceMesh) -> Tensor:
        through, rotary = x.split([x.shape[-1] - width, width], dim=-1)
        return torch.cat((through, in_parts(rotary, mesh)), dim=-1)

    return change


def _splits_heads(rules: Plan) -> bool:
    return any(rule == "colwise" and re.search(r"\.(q|k|v|qkv|kv|query)_\w+$", name) for name, rule in rules.items())


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)

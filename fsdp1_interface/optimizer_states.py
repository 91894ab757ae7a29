"""FSDP1's methods for the state of an optimizer: by names instead of numbers, whole or sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullOptimStateDictConfig, ShardedOptimStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp1_interface.arguments import Unsupported
from fsdp1_interface.explain import say
from fsdp1_interface.shard import reshard_all
from fsdp1_interface.sharding import unit_of
from fsdp1_interface.states import as_kind, first_rank, plain, settings_of, shard_like

State = dict[str, Any]


def optim_state_dict(
    model: nn.Module, optim: Optimizer, optim_state_dict: State | None = None, group: Any = None
) -> State:
    """{"state": {name: {"exp_avg": tensor, …}}, "param_groups": [{…, "params": [name, …]}]}, each tensor whole or
    sharded as the settings of `set_state_dict_type` say. A collective call.

    Args:
        optim_state_dict: `optim.state_dict()`, if it was taken already.

        group: the ranks that shard the model; None means them as well.

    With `rank0_only` other ranks get {}. Raises Unsupported for another group.
    """
    _require_own(model, group)
    settings = settings_of(model)
    return _named(model, optim, optim_state_dict, settings.state_dict_type, settings.optim_state_dict_config)


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: State | None,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Any = None,
) -> State:
    """Make what `optim.load_state_dict` takes of a state dict by names, whole or sharded. Tensors are copies. Under a
    FullOptimStateDictConfig with `rank0_only` it is what rank 0 has, whatever the others are given. Collective.

    Raises:
        ValueError: it has no state for a parameter, or state for one that the model doesn't have, or moments of which
            one lies over another.
        Unsupported: `is_named_optimizer`, or a `group` other than the ranks that shard the model.
    """
    if is_named_optimizer:
        raise Unsupported("optim_state_dict_to_load(is_named_optimizer=True): torch.optim's optimizers have numbers")
    _require_own(model, group)
    _say(None, "optim_state_dict_to_load()", "set_optimizer_state_dict(model, optim, state")
    reshard_all(model)
    if getattr(settings_of(model).optim_state_dict_config, "rank0_only", False):
        optim_state_dict = _of_first_rank(optim_state_dict, group)
    elif wrong := _overwritten(optim_state_dict):
        raise ValueError(wrong)
    if optim_state_dict is None:
        raise ValueError("optim_state_dict_to_load(): no state given; with rank0_only=True rank 0 alone needs one")
    names = _names(model)
    groups, state = [], {}
    number = 0
    saved = {name: given for given in optim_state_dict["param_groups"] for name in given["params"]}
    for group_now in optim.param_groups:
        numbers, of_group = [], {}
        for parameter in group_now["params"]:
            name = names[parameter]
            if name not in saved:
                raise ValueError(f"optimizer state: it has nothing for {name}; is it of another model?")
            of_group = saved.pop(name)
            if name in optim_state_dict["state"]:
                state[number] = {
                    key: _shard(value, parameter) for key, value in optim_state_dict["state"][name].items()
                }
            numbers.append(number)
            number += 1
        groups.append({**{key: value for key, value in of_group.items() if key != "params"}, "params": numbers})
    if saved:
        raise ValueError(f"optimizer state: the model has no {', '.join(sorted(saved))}; is it of another model?")
    loadable = {"state": state, "param_groups": groups}
    if load_directly:
        optim.load_state_dict(loadable)
    return loadable


def _overwritten(state: State | None) -> str | None:
    """Name moments that share their memory, as FSDP1 saves them on a CPU with use_orig_params=True."""
    for name, values in (state or {}).get("state", {}).items():
        places = dict[int, str]()
        for key, one in values.items():
            if type(one) is Tensor and one.numel() > 1 and (other := places.setdefault(one.data_ptr(), key)) != key:
                return (
                    f"optimizer state: {other} and {key} of {name} are the same memory: FSDP1 on a CPU overwrote one "
                    "with the other when it saved; save again by FSDP1 with offload_to_cpu=False, or load the weights "
                    "alone"
                )
    return None


def full_optim_state_dict(
    model: nn.Module, optim: Optimizer, optim_input: Any = None, rank0_only: bool = True, group: Any = None
) -> State:
    """Deprecated in FSDP1 too: `optim_state_dict` under FULL_STATE_DICT, on the CPU."""
    _require_own(model, group)
    config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
    return _named(model, optim, None, StateDictType.FULL_STATE_DICT, config, "full_")


def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: Any = None) -> State:
    """Deprecated in FSDP1 too: `optim_state_dict` under SHARDED_STATE_DICT, on the device."""
    _require_own(model, group)
    config = ShardedOptimStateDictConfig(offload_to_cpu=False)
    return _named(model, optim, None, StateDictType.SHARDED_STATE_DICT, config, "sharded_")


def shard_full_optim_state_dict(
    full_optim_state_dict: State, model: nn.Module, optim_input: Any = None, optim: Optimizer | None = None
) -> State:
    """Deprecated in FSDP1 too: `optim_state_dict_to_load`."""
    return optim_state_dict_to_load(model, optim or _of_input(model, optim_input), full_optim_state_dict)


def flatten_sharded_optim_state_dict(sharded_optim_state_dict: State, model: nn.Module, optim: Optimizer) -> State:
    """Deprecated in FSDP1 too: `optim_state_dict_to_load`."""
    return optim_state_dict_to_load(model, optim, sharded_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: State | None,
    model: nn.Module,
    optim_input: Any = None,
    optim: Optimizer | None = None,
    group: Any = None,
) -> State:
    """Deprecated in FSDP1 too: `optim_state_dict_to_load` of what rank 0 has."""
    state = _of_first_rank(full_optim_state_dict, group)
    return optim_state_dict_to_load(model, optim or _of_input(model, optim_input), state)


def rekey_optim_state_dict(*args: Any, **kwargs: Any) -> State:
    raise Unsupported(
        "rekey_optim_state_dict(): the state of an optimizer has names here. Convert a checkpoint with numbers once: "
        "python -m fsdp2.migrate checkpoint"
    )


@torch.no_grad()
def _named(
    model: nn.Module, optim: Optimizer, raw: State | None, kind: StateDictType, config: Any, what: str = ""
) -> State:
    _say(kind, f"{what}optim_state_dict()", "state = get_optimizer_state_dict(model, optim")
    reshard_all(model)
    raw = optim.state_dict() if raw is None else raw
    names = _names(model)
    # Numbers count the parameters through the groups, as torch.optim does.
    ordered = [names[parameter] for group in optim.param_groups for parameter in group["params"]]
    unit = unit_of(model)
    keep = not getattr(config, "rank0_only", False) or unit is None or first_rank(unit)
    state = {
        ordered[number]: {key: as_kind(value, kind, config, keep) for key, value in values.items()}
        for number, values in raw["state"].items()
    }
    if not keep:
        return {}
    groups = [{**group, "params": [ordered[number] for number in group["params"]]} for group in raw["param_groups"]]
    return {"state": state, "param_groups": groups}


def _names(model: nn.Module) -> Mapping[nn.Parameter, str]:
    return {parameter: plain(name) for name, parameter in model.named_parameters()}


def _shard(value: Any, parameter: nn.Parameter) -> Any:
    """Copied, `step` too: FSDP1's state dicts share one among the parameters of a flat one, and an optimizer that
    counts in it would count once for each of them."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(parameter, DTensor) and value.shape == parameter.shape and value.dim():
        value = shard_like(value, parameter)
    return value.detach().clone()


def _require_own(model: nn.Module, group: Any) -> None:
    """A tensor is gathered over the mesh that it is sharded over, so another group can't be asked."""
    unit = unit_of(model)
    if group is None or unit is None:
        return
    own, given = (dist.get_process_group_ranks(one) for one in (unit.process_group, group))
    if own != given:
        raise Unsupported(
            f"group of the ranks {given}: the model is sharded over {own}, which alone can gather its state; leave "
            "group out"
        )


def _of_first_rank(state: State | None, group: Any) -> State:
    box = [(state, _overwritten(state))]  # what is sent no longer shows which tensors share their memory
    dist.broadcast_object_list(box, src=0, group=group)
    state, wrong = box[0]
    if state is None:
        raise ValueError("optimizer state: rank 0 has none to give to the others")
    if wrong:
        raise ValueError(wrong)
    return state


def _of_input(model: nn.Module, optim_input: Any) -> Optimizer:
    """An optimizer in the place of one that isn't given: which parameter has which number is all that is asked of it.
    FSDP1 takes the model's parameters in their order where it isn't given `optim_input` either."""
    return torch.optim.SGD(list(optim_input if optim_input is not None else model.parameters()), lr=0.0)


def _say(kind: StateDictType | None, what: str, call: str) -> None:
    options = ", options=StateDictOptions(full_state_dict=True, cpu_offload=True)"
    name = call.split("(")[0].rpartition(" ")[2]
    code = f"from torch.distributed.checkpoint.state_dict import StateDictOptions, {name}\n{call}"
    say(what, f"{code}{options if kind is StateDictType.FULL_STATE_DICT else ''})")

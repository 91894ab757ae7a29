"""State dicts of each kind: `state_dict()` and `load_state_dict()` stay torch's, hooks change what is in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp.api import OptimStateDictConfig
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp1_interface.arguments import Unsupported
from fsdp1_interface.explain import say
from fsdp1_interface.shard import reshard_all
from fsdp1_interface.sharding import Unit, unit_of

CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
CODE = {
    StateDictType.FULL_STATE_DICT: (
        "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict\n"
        "full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))\n"
        "# on every rank; rank 0 has the tensors"
    ),
    StateDictType.SHARDED_STATE_DICT: (
        "from torch.distributed.checkpoint.state_dict import get_model_state_dict\n"
        "sharded = get_model_state_dict(model)  # DTensors, for torch.distributed.checkpoint.save"
    ),
}
CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."


class StateDicts:
    """FSDP1's methods that say which kind of state dict is meant."""

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """The settings before. Raises Unsupported for LOCAL_STATE_DICT, TypeError for another kind's config."""
        if state_dict_type not in CONFIGS:
            raise Unsupported(
                "LOCAL_STATE_DICT: it holds flat shards without names, which FSDP2 doesn't have. Use "
                "SHARDED_STATE_DICT; an old checkpoint has to be saved again from FSDP1 first"
            )
        model_config, optim_config = CONFIGS[state_dict_type]
        new = StateDictSettings(
            state_dict_type, state_dict_config or model_config(), optim_state_dict_config or optim_config()
        )
        if type(new.state_dict_config) is not model_config or type(new.optim_state_dict_config) is not optim_config:
            raise TypeError(
                f"{state_dict_type.name} takes a {model_config.__name__} and a {optim_config.__name__}; "
                f"{type(new.state_dict_config).__name__} and {type(new.optim_state_dict_config).__name__} given"
            )
        say(state_dict_type.name, CODE[state_dict_type])
        before = settings_of(module)
        for inner in module.modules():
            if unit_of(inner) is not None:
                inner._fsdp1_state_dicts = new  # type: ignore[assignment]
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Raises RuntimeError if parts of the module were set to different kinds."""
        return settings_of(module)

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        before = StateDicts.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            StateDicts.set_state_dict_type(module, *vars(before).values())


def settings_of(module: nn.Module) -> StateDictSettings:
    require_own(module)
    found = [_settings(inner) for inner in module.modules() if unit_of(inner) is not None]
    if any(other != found[0] for other in found):
        raise RuntimeError("get_state_dict_type: parts of this model are set to different kinds of state dict")
    return found[0] if found else _default()


def require_own(module: nn.Module) -> None:
    """Raise Unsupported for a model that torch's FSDP1 has sharded, whose flat shards would be taken for whole."""
    if any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules()):
        raise Unsupported(
            f"{type(module).__name__} is sharded by torch's FSDP1, most likely by a library; what is done with it "
            "needs torch's own FullyShardedDataParallel"
        )


def _default() -> StateDictSettings:
    """FSDP1's, when nothing was said."""
    return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())


def _settings(module: nn.Module) -> StateDictSettings:
    return module.__dict__.get("_fsdp1_state_dicts") or _default()


def register_hooks(module: nn.Module) -> nn.Module:
    module.register_state_dict_post_hook(_after_state_dict)
    module.register_load_state_dict_pre_hook(_before_load)
    return module


def plain(name: str) -> str:
    return name.replace(CHECKPOINT_WRAPPER, "")


def first_rank(unit: Unit) -> bool:
    """Return whether `rank0_only` leaves the tensors here: on the first rank of each group that shards."""
    return bool(unit.process_group.rank() == 0)


def as_kind(value: Any, kind: StateDictType, config: Any, keep: bool) -> Any:
    """A tensor of a state dict as its kind says. A collective call for a full one.

    Args:
        keep: False where the tensor isn't wanted on this rank, which takes part in gathering it all the same.
    """
    if not isinstance(value, Tensor):
        return value
    if kind is StateDictType.FULL_STATE_DICT and isinstance(value, DTensor):
        value = value.full_tensor()
    if not keep:
        return None
    return value.cpu() if config.offload_to_cpu else value


@torch.no_grad()
def _after_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    settings, unit = _settings(module), unit_of(module)
    assert unit is not None  # hooks are registered on units
    kind, config = settings.state_dict_type, settings.state_dict_config
    keep = not getattr(config, "rank0_only", False) or first_rank(unit)
    buffers = {prefix + plain(name): dtype for name, dtype in unit.buffer_dtypes.items()}
    inner = tuple(
        f"{prefix}{plain(name)}."
        for name, part in module.named_modules()
        if part is not module and unit_of(part) is not None
    )
    # Inner units have settings and hooks of their own, which were called before.
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(inner)]:
        value = as_kind(state[key], kind, config, keep)
        if not keep:
            del state[key]
        else:
            state[key] = value.to(buffers[key]) if key in buffers else value


@torch.no_grad()
def _before_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Cut whole tensors to the shards of this rank, from its own copy: FSDP1 sends nothing either."""
    reshard_all(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):  # tied weights stand there by each name
        key = prefix + plain(name)
        value = state.get(key)
        if isinstance(value, Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape:
            state[key] = shard_like(value, parameter)


def shard_like(value: Tensor, like: DTensor) -> DTensor:
    """This rank's part of a whole tensor, as `like` is sharded; a DTensor as it is. On the mesh's device: where the
    shards are offloaded, whatever it is copied to is elsewhere.

    Raises Unsupported for a ShardedTensor, as `load_sharded_optimizer_state_dict` makes them, with other shards.
    """
    if isinstance(value, DTensor):
        return value
    mesh, placements = like.device_mesh, like.placements
    if not hasattr(value, "local_shards"):
        return distribute_tensor(value.to(mesh.device_type), mesh, placements, src_data_rank=None)
    shape = like.to_local().shape
    shards = [shard.tensor for shard in value.local_shards()] or [torch.empty(shape, dtype=value.dtype)[:0]]
    if len(shards) > 1 or shards[0].shape != shape:
        raise Unsupported(
            f"a ShardedTensor of shape {tuple(value.shape)} has {tuple(shards[0].shape)} of it here, and the model "
            f"{tuple(shape)}: fill optim_state_dict(model, optim) by torch.distributed.checkpoint.load instead"
        )
    local = shards[0].to(mesh.device_type)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())

"""The one function that turns a model on `meta` into a sharded one with an optimizer.

Read it top to bottom: the order of the steps is the documentation, and each says why it stands there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdp2.config import Config
from fsdp2.options.deepspeed_settings import settings
from fsdp2.options.strategies import ZERO
from fsdp2.parallel import ddp, fsdp1, fully_sharded, precision, zero
from fsdp2.parallel.activation_checkpointing import checkpoint_activations
from fsdp2.parallel.engine import Engine
from fsdp2.parallel.groups import shard_groups
from fsdp2.parallel.inspect import local
from fsdp2.parallel.mesh import make_mesh
from fsdp2.parallel.none import NoneEngine
from fsdp2.parallel.optimizer import make_optimizer
from fsdp2.parallel.prefetch import prefetch_backward, prefetch_forward
from fsdp2.parallel.zero_state import Shadow


def parallelize(
    config: Config,
    *,
    build: Callable[[], nn.Module],
    blocks_of: Callable[[nn.Module], Sequence[nn.Module]],
    set_weights: Callable[[nn.Module], None],
    load_weights: Callable[[nn.Module], None] = lambda model: None,
    device: torch.device,
    world_size: int,
    training: bool = True,
) -> Engine:
    """Build, shard and initialise a model as `config` says.

    Args:
        build: makes the model on the current device, which will be `meta`.
        blocks_of: its blocks in forward order: the unit of sharding, recomputation and compilation.
        set_weights: gives every parameter and buffer its initial value.
        load_weights: puts a file's weights on top, if there are any.
        training: False leaves out the optimizer.

    Raises RuntimeError if a parameter or buffer is left on `meta` or unset.
    """
    # The mesh comes first: everything below is placed on it.
    mesh = make_mesh(device.type, world_size, config.replicas)

    # On meta, a model has shapes and no memory, so it may be larger than any one device.
    with torch.device("meta"):
        model = build()
    # Freezing before anything looks at requires_grad: the strategies and the optimizer do.
    freeze(model, config.freeze)
    blocks = blocks_of(model)

    # Recomputation goes innermost: it must repeat a block's arithmetic, not its communication.
    if config.activation_checkpointing:
        checkpoint_activations(blocks, config.activation_checkpointing)

    # Compile each block before fully_shard adds its hooks, which break the graph; and each block rather than
    # the model, since equal blocks share one compilation.
    if config.compile:
        for block in blocks:
            block.compile()

    # Shard the groups, then the root, while there is still nothing to move.
    if config.strategy == "fsdp2":
        groups = fully_sharded.shard(
            model,
            shard_groups(blocks, config.shard_granularity),
            mesh=mesh,
            precision=precision.fsdp2_policy(config.mixed_precision, config.reduce_dtype),
            offload=fully_sharded.offload_policy(config.cpu_offload, device.type),
            reshard_after_forward=config.reshard_after_forward,
        )
        # The schedule refers to sharded groups, so they have to exist.
        forward, backward = config.prefetches
        if forward:
            prefetch_forward(groups, forward)
        if backward:
            prefetch_backward(groups, backward)

    # Only now memory: each rank allocates its shards alone. What to_empty leaves is garbage.
    allocate(model, device, cpu_offload=config.cpu_offload)
    poison(model)
    set_weights(model)
    check_initialised(model)
    # A file's weights come after the check: a NaN among them is the file's own. What is in no file is set by now.
    load_weights(model)

    if config.strategy in ZERO:
        return with_deepspeed(config, model, build, mesh, device)

    # The optimizer takes the parameters as they are now: sharded, or flattened by FSDP1.
    scaler = precision.gradient_scaler(device.type, config.mixed_precision)
    if config.strategy == "fsdp1":
        model = fsdp1.wrap(
            model,
            fsdp1.wrap_policy(blocks, config.shard_granularity, config.min_wrap_params),
            mesh=mesh,
            device=device,
            precision=precision.fsdp1_policy(config.mixed_precision, config.reduce_dtype),
            sharding=config.fsdp1_sharding,
            backward_prefetch=config.fsdp1_backward_prefetch,
            cpu_offload=config.cpu_offload,
        )
        scaler = fsdp1.gradient_scaler(device.type, config.mixed_precision)
    elif config.strategy == "ddp":
        model = ddp.replicate(model, mesh, config.bucket_mb)
    optimizer = None
    if training:
        optimizer = make_optimizer(config.optimizer, model.parameters(), config.lr, fused=config.fused_optimizer)

    if config.strategy == "fsdp2":
        return fully_sharded.FSDP2Engine(model, optimizer, scaler, early_unshard=any(config.prefetches))
    if config.strategy == "fsdp1":
        return fsdp1.FSDP1Engine(model, optimizer, scaler)
    engine = ddp.DDPEngine if config.strategy == "ddp" else NoneEngine
    return engine(model, optimizer, scaler, precision.autocast(device.type, config.mixed_precision))


def with_deepspeed(
    config: Config, model: nn.Module, build: Callable[[], nn.Module], mesh: DeviceMesh, device: torch.device
) -> zero.ZeROEngine:
    """The engine of a ZeRO strategy, from a model with its initial values. DeepSpeed shards it itself."""
    # Without state: DeepSpeed puts its shards in the place of the parameters, whose state would only stay around.
    fused = config.fused_optimizer
    optimizer = make_optimizer(config.optimizer, model.parameters(), config.lr, fused=fused, materialised=False)
    deepspeed = settings(config, device.type)
    engine = zero.initialize(model, optimizer, deepspeed, device)
    # What checkpoints see: the same model, sharded as FSDP2's, with memory only while one is saved or loaded.
    with torch.device("meta"):
        copy = build()
    freeze(copy, config.freeze)
    fully_sharded.shard(
        copy, [], mesh=mesh, precision=MixedPrecisionPolicy(), offload=OffloadPolicy(), reshard_after_forward=None
    )
    allocate(copy, device, cpu_offload=False)
    return zero.ZeROEngine(engine, optimizer, Shadow(engine, optimizer, copy, config.optimizer), deepspeed)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Switch off the gradients of the parameters whose name matches one of the patterns.

    Raises ValueError if a pattern matches nothing, or if nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{pattern}: no parameter of the model has such a name; the names are like {names[0]}")
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"{' '.join(patterns)}: would freeze every parameter and leave nothing to train")


def allocate(model: nn.Module, device: torch.device, *, cpu_offload: bool) -> None:
    """Give a model on meta its memory; with offload, parameters on the CPU and buffers where they are used."""
    model.to_empty(device="cpu" if cpu_offload else device)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device=device))


def poison(model: nn.Module) -> None:
    """Make the garbage that to_empty leaves recognisable: NaN wherever a dtype has it."""
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            if tensor.is_floating_point() or tensor.is_complex():
                local(tensor).fill_(math.nan)


def check_initialised(model: nn.Module) -> None:
    """Raise RuntimeError, naming them, if parameters or buffers are on meta or still hold a NaN of `poison`."""
    named = list(itertools.chain(model.named_parameters(), model.named_buffers()))
    on_meta = [name for name, tensor in named if tensor.is_meta]
    if on_meta:
        raise RuntimeError(f"{len(on_meta)} tensors were left on meta: {', '.join(on_meta)}")
    unset = [name for name, tensor in named if local(tensor).isnan().any()]  # integers have no NaN and pass
    if unset:
        raise RuntimeError(f"{len(unset)} of {len(named)} tensors were not initialised: {', '.join(unset)}")

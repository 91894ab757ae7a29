"""The one function that turns a model on `meta` into one that FSDP2 shards, with an optimizer.

Read it top to bottom: the order of the steps is the documentation, and each says why it stands there. The
strategies that FSDP2 is compared with are built elsewhere, in `fsdp2_extra/baselines/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp2.parallel.freeze import freeze
from fsdp2.parallel.fully_sharded import FSDP2Engine, gather_for, offload_policy, shard
from fsdp2.parallel.groups import shard_groups
from fsdp2.parallel.mesh import make_mesh, of_fsdp, of_pieces
from fsdp2.parallel.meta import allocate, check_initialised
from fsdp2.parallel.optimizer import make_optimizer
from fsdp2.parallel.precision import fsdp2_policy, gradient_scaler
from fsdp2.parallel.prefetch import groups_ahead, prefetch_backward, prefetch_forward

if TYPE_CHECKING:
    from fsdp2.config import Config


def parallelize(
    config: Config,
    *,
    build: Callable[[], nn.Module],
    blocks_of: Callable[[nn.Module], Sequence[nn.Module]],
    set_weights: Callable[[nn.Module], None],
    load_weights: Callable[[nn.Module], None] | None = None,
    device: torch.device,
    world_size: int,
    training: bool = True,
    brought: Callable[[str], bool] = lambda name: False,
    methods: Sequence[str] = (),
    splits: Callable[[], Mapping[str, Any]] | None = None,
) -> FSDP2Engine:
    """Build, shard and initialise a model as `config` says. A collective call.

    Args:
        build: makes the model, its parameters on `meta`. Buffers that aren't on meta keep their values.
        blocks_of: its blocks in forward order: the unit of sharding, recomputation and compilation.
        set_weights: gives every parameter and buffer its initial value, in place.
        load_weights: puts a file's weights on top, if there are any.
        training: False leaves out the optimizer.
        brought: whether a checkpoint that the caller will load, or `load_weights`, sets what has this name in the state
            dict. `set_weights` sets the rest, such as non-persistent buffers.
        methods: the model's own beside `forward` that need its parameters; see `gather_for`.
        splits: makes the plan by which ranks of `tp` split its layers; see `split_layers`.

    Returns an engine whose parameters are DTensors in the dtype in which `build` makes them, fp32 unless it says more,
    and whose optimizer has state at step 0. Raises RuntimeError if a parameter or buffer is left on `meta` or unset,
    and ValueError for parameters that can't be sharded in these groups.

    Source: https://docs.pytorch.org/docs/main/distributed.fsdp.fully_shard.html
    """
    assert config.strategy == "fsdp2", f"{config.strategy} is built by parallel.baselines"

    # The mesh comes first: everything below is placed on it.
    mesh = make_mesh(device.type, world_size, config.replicas, config.tp)

    # On meta, a model has shapes and no memory, so it may be larger than any one device.
    model = build()
    # Freezing before anything looks at requires_grad: fully_shard and the optimizer do.
    freeze(model, config.freeze)
    # Splitting layers first: what follows takes a rank's part of each as the layer.
    if config.tp > 1:
        from fsdp2.parallel.tensor import split_layers

        assert splits is not None, "the model has no plan"
        split_layers(model, splits(), mesh["tp"])
    if config.sp > 1:
        from fsdp2.parallel.sequence import split_sequences

        split_sequences(model, of_pieces(device.type, world_size, config.tp, config.sp).get_group())
    blocks = blocks_of(model)

    # Float8 replaces modules, so it comes before anything refers to one.
    if config.float8 is not None:
        from fsdp2_extra.low_precision import float8

        gather = float8.gathers(config.float8, config.reshard_after_forward, config.cpu_offload)
        float8.compute_in_float8(model, blocks, config.float8, device.type, gather=gather)

    # Recomputation goes innermost: it must repeat a block's arithmetic, not its communication.
    if config.activation_checkpointing:
        from fsdp2.parallel.activation_checkpointing import checkpoint_activations

        checkpoint_activations(blocks, config.activation_checkpointing)

    # Compile each block before fully_shard adds its hooks, which break the graph; and each block rather than
    # the model, since equal blocks share one compilation.
    if config.compile:
        from fsdp2.parallel.compiling import compile_blocks

        compile_blocks(blocks)

    # Shard the groups, then the root, while there is still nothing to move.
    groups = shard(
        model,
        shard_groups(model, blocks, config.shard_granularity),
        mesh=of_fsdp(mesh),
        precision=fsdp2_policy(config.mixed_precision, config.reduce_dtype),
        offload=offload_policy(config.cpu_offload, device.type),
        reshard_after_forward=config.reshard_after_forward,
    )
    # FSDP2 has prepared for weights that are gathered in float8; what holds and saves shards gets plain ones.
    if config.float8 is not None:
        float8.keep_plain_shards(model)

    # FSDP2 gathers parameters for `forward` alone; a model may have other ways in, such as `generate`.
    gather_for(model, methods)

    # The schedule refers to sharded groups, so they have to exist.
    forward, backward = groups_ahead(config)
    if forward:
        prefetch_forward(groups, forward)
    if backward:
        prefetch_backward(groups, backward)

    # Only now memory: each rank allocates its shards alone, and they are NaN until they get a value.
    allocate(model, device, cpu_offload=config.cpu_offload)
    # Float8 marks each shard, so the shards must exist.
    if config.float8 is not None:
        float8.gather_in_float8(model)
    set_weights(model)
    check_initialised(model, brought=brought)
    # A file's weights come after the check: a NaN among them is the file's own. What is in no file is set by now.
    if load_weights is not None:
        load_weights(model)

    # The optimizer takes the parameters as they are now, sharded; its state is shards from the start.
    optimizer = make_optimizer(config, model.parameters()) if training else None
    scaler = gradient_scaler(device.type, config.mixed_precision)
    return FSDP2Engine(
        model,
        optimizer,
        scaler,
        early_unshard=bool(forward or backward),
        accumulation_sync=config.grad_accumulation_sync,
        splits_words=config.tp > 1,
    )

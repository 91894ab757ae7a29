"""Strategy `fsdp1`: FullyShardedDataParallel, the predecessor of `fully_shard`, as a baseline.

It flattens the parameters of a unit into one tensor and shards that. Source: https://arxiv.org/abs/2304.11277

Units get memory and initial values one after the other, and each is sharded before the next, so that a rank never holds
more than its shards and one whole unit.

On a CPU everything but CPUOffload works: that copies through pinned memory, which needs a GPU's driver.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy, size_based_auto_wrap_policy

from fsdp2.parallel.engine import Engine, Microbatch
from fsdp2.parallel.fully_sharded import outlive
from fsdp2.parallel.mesh import make_mesh
from fsdp2.parallel.optimizer import make_optimizer
from fsdp2.parallel.precision import DTYPES
from fsdp2.parallel.rules import Baseline, Options, SetWeights, Start
from fsdp2_extra.baselines.starting import fill, materialise, meta_model, model_of, ties_weights

SHARDING = {
    "full-shard": ShardingStrategy.FULL_SHARD,  # parameters, gradients and optimizer state
    "shard-grad-op": ShardingStrategy.SHARD_GRAD_OP,  # parameters stay gathered from forward to backward
    "no-shard": ShardingStrategy.NO_SHARD,  # as DDP
    "hybrid-shard": ShardingStrategy.HYBRID_SHARD,  # over the inner dimension of a 2-D mesh
    "hybrid-shard-zero2": ShardingStrategy._HYBRID_SHARD_ZERO2,  # public by its documentation, if not by its name
}
PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "never": None}
Policy = Callable[..., bool] | CustomPolicy | None


def wrap_policy(blocks: Sequence[nn.Module], granularity: int | str, min_params: int | None) -> Policy:
    """Choose the units beside the root.

    Args:
        granularity: 1 for each block, as `transformer_auto_wrap_policy` does; `root` for nothing.
        min_params: not None wraps, bottom up and whatever it is, each module of so many parameters that are in no
            unit yet, as `size_based_auto_wrap_policy` does.
    """
    if min_params is not None:
        return partial(size_based_auto_wrap_policy, min_num_params=min_params)
    units = set(blocks)
    return None if granularity == "root" else CustomPolicy(lambda module: module in units)


def wrap(
    model: nn.Module,
    policy: Policy,
    *,
    mesh: DeviceMesh,
    start: Start,
    precision: MixedPrecision | None,
    sharding: str,
    backward_prefetch: str,
    cpu_offload: bool,
) -> FullyShardedDataParallel:
    """Wrap what the policy names and then the root, of a model on meta; each unit gets its initial values first.

    Each rank must call it with the same model; a hybrid strategy makes process groups, which is a collective.
    """
    names = {module: name for name, module in model.named_modules()}

    def initialise(module: nn.Module) -> None:
        materialise(module, names[module], start)

    with warnings.catch_warnings():
        # Chosen on purpose, as a baseline; torch announces the deprecation of it again and again.
        warnings.simplefilter("ignore", FutureWarning)
        sharded = FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            device_mesh=mesh,  # with a mesh, sharded state dicts hold DTensors, as FSDP2's do
            device_id=start.device,
            param_init_fn=initialise,  # of each module of a unit, before the unit is flattened and sharded
            mixed_precision=precision,
            sharding_strategy=SHARDING[sharding],
            backward_prefetch=PREFETCH[backward_prefetch],
            cpu_offload=CPUOffload(offload_params=cpu_offload),
            use_orig_params=True,  # keeps names and lets frozen and trained parameters share a unit
        )
        # Sharded, so that state dicts need no rank to hold the whole model.
        FullyShardedDataParallel.set_state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT)
    for unit in FullyShardedDataParallel.fsdp_modules(sharded):
        unit.module.register_forward_hook(outlive)
    return sharded


def mixed_precision(compute: str | None, reduce: str) -> MixedPrecision | None:
    """FSDP1's policy, like FSDP2's; None leaves everything in fp32."""
    if compute is None:
        return None
    # Buffers stay fp32, as FSDP2, which doesn't cast them, leaves them.
    return MixedPrecision(param_dtype=DTYPES[compute], reduce_dtype=DTYPES[reduce], buffer_dtype=torch.float32)


def load(model: FullyShardedDataParallel, load_weights: SetWeights) -> None:
    """Let `load_weights` fill a model. Its state dict is a copy, so that is filled, and then loaded.

    A collective call.
    """
    copy = model_of(model.state_dict())
    load_weights(copy)
    model.load_state_dict(copy.state_dict())


def gradient_scaler(device_type: str, compute: str | None) -> torch.amp.GradScaler:
    """FSDP1's gradients are plain tensors with other values on each rank, so it needs a scaler of its own
    that reduces the overflow flag; FSDP2's DTensors carry that reduction themselves."""
    return ShardedGradScaler(device_type, enabled=compute == "fp16")


class FSDP1Engine(Engine):
    strategy = "fsdp1"

    model: FullyShardedDataParallel

    @property
    def sharding(self) -> str:
        units = len(FullyShardedDataParallel.fsdp_modules(self.model))
        return f"FullyShardedDataParallel, {units} units, {self.model.sharding_strategy.name}"

    def backward(self, loss: Tensor, last_microbatch: bool) -> None:
        with nullcontext() if last_microbatch else self.model.no_sync():
            super().backward(loss, last_microbatch)

    def forward(self, batch: Microbatch) -> Any:
        with nullcontext() if batch.last else self.model.no_sync():
            return super().forward(batch)

    def _clip(self, norm: float | None) -> Tensor:
        # Each rank's gradients are a part of the flat ones; FSDP1's own method sums their squares over ranks.
        return self.model.clip_grad_norm_(float("inf") if norm is None else norm)


def build(options: Options, start: Start) -> FSDP1Engine:
    """A model wrapped by FSDP1, each unit with its initial values before it is sharded. A collective call."""
    mesh = make_mesh(start.device.type, start.world_size, options.replicas)
    model, blocks = meta_model(options, start)
    if ties_weights(model):  # a module at a time, each would get a weight of its own
        fill(model, options, start)
    sharded = wrap(
        model,
        wrap_policy(blocks, options.shard_granularity, options.min_wrap_params),
        mesh=mesh,
        start=start,
        precision=mixed_precision(options.mixed_precision, options.reduce_dtype),
        sharding=options.fsdp1_sharding,
        backward_prefetch=options.fsdp1_backward_prefetch,
        cpu_offload=options.cpu_offload,
    )
    if start.load_weights is not None:
        load(sharded, start.load_weights)
    # The optimizer takes the parameters as FSDP1 has flattened them.
    optimizer = make_optimizer(options, sharded.parameters())
    return FSDP1Engine(sharded, optimizer, gradient_scaler(start.device.type, options.mixed_precision))


def refusals(options: Options) -> Iterator[str]:
    """A line for each combination of flags that FSDP1 can't honour."""
    if options.shard_granularity not in (1, "root"):
        yield (
            f"--shard-granularity {options.shard_granularity} with --strategy fsdp1: a policy of its wraps one module "
            "at a time; use 1 (each block), root, or --min-wrap-params N"
        )
    if options.min_wrap_params is not None and options.shard_granularity != 1:
        yield (
            f"--min-wrap-params with --shard-granularity {options.shard_granularity}: both say what is wrapped; "
            "drop one of them"
        )
    hybrid = options.fsdp1_sharding.startswith("hybrid")
    if hybrid != (options.replicas > 1):
        yield (
            f"--fsdp1-sharding {options.fsdp1_sharding} with --replicas {options.replicas}: "
            + ("a hybrid has 2 replicas or more" if hybrid else "only hybrid-shard and hybrid-shard-zero2 replicate")
            + "; change one of them"
        )
    if options.dcp_api:
        # Measured: FSDP1's FULL_STATE_DICT fails on CPU before torch 2.15 and crashes the process on 2.11.
        yield (
            "--dcp-api with --strategy fsdp1: the DCP API uses FSDP1's full state dict, which crashes on CPU in "
            "torch 2.11; drop --dcp-api or use --strategy fsdp2"
        )


def in_world(options: Options, world_size: int) -> Iterator[str]:
    """A line for a hybrid whose shard dimension is 1.

    FSDP1 takes such a unit for an unsharded one and averages its gradients over the shard group, which is one rank. The
    all-reduce between replicas belongs to the sharded path alone, so it never happens.
    """
    if options.replicas > 1 and options.replicas == world_size:
        yield (
            f"--fsdp1-sharding {options.fsdp1_sharding} with --replicas {options.replicas} on {world_size} ranks: "
            "FSDP1 never averages gradients between replicas of one rank, so each would train a model of its own; use "
            "--fsdp1-sharding no-shard without --replicas, fewer replicas, or --strategy fsdp2"
        )


def on_device(options: Options, device_type: str) -> Iterator[str]:
    """A line for each flag that FSDP1 can't honour on this device type."""
    if options.cpu_offload and device_type == "cpu":
        yield (
            "--cpu-offload with --strategy fsdp1 on the CPU: FSDP1 offloads through pinned memory, which needs a GPU's "
            "driver; use --strategy fsdp2 or drop --cpu-offload"
        )


BASELINE = Baseline(
    build=build,
    shards_state=True,
    honours=(
        "betas",
        "cpu_offload",
        "replicas",
        "shard_granularity",
        "fsdp1_sharding",
        "min_wrap_params",
        "fsdp1_backward_prefetch",
    ),
    instead={
        "reshard_after_forward": "chooses this by its sharding strategy (--fsdp1-sharding shard-grad-op is false)",
        **dict.fromkeys(
            ("explicit_prefetching", "forward_prefetch", "backward_prefetch"),
            "has no explicit schedule (--fsdp1-backward-prefetch is its own)",
        ),
    },
    refusals=refusals,
    in_world=in_world,
    on_device=on_device,
)

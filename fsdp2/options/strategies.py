"""Flags that a strategy honours, and what the others lack. A flag that would do nothing is refused.

Each strategy states its own rules beside its code; here they become ConfigErrors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from fsdp2.options.checks import attention_refusals
from fsdp2.options.errors import ConfigError, flag_of
from fsdp2.parallel import FLOAT8_CAPABILITY
from fsdp2.parallel.baselines import NAMES, baseline
from fsdp2.parallel.prefetch import groups_ahead
from fsdp2.parallel.rules import Options, Rules


def _fsdp2_refusals(options: Options) -> Iterator[str]:
    yield from _tensor_parallel_refusals(options)
    yield from _sequence_parallel_refusals(options)
    if options.shard_granularity == "root" and groups_ahead(options) != (None, None):
        yield (
            "--explicit-prefetching with --shard-granularity root: one group has nothing to prefetch; drop one of them"
        )
    if options.check_replicas is not None and options.replicas == options.tp == 1:
        yield "--check-replicas with --replicas 1: no rank holds what another holds; add --replicas R or drop it"
    mode = options.grad_accumulation_sync
    if mode != "every" and options.grad_accumulation == 1 and options.global_batch_size is None:
        yield (
            f"--grad-accumulation-sync {mode} with --grad-accumulation 1: one microbatch is exchanged once anyway; "
            "add --grad-accumulation N or drop it"
        )
    if mode == "replica" and options.replicas == 1:
        yield (
            "--grad-accumulation-sync replica with --replicas 1: no all-reduce between replicas could wait; add "
            "--replicas R or use --grad-accumulation-sync every"
        )


def _tensor_parallel_refusals(options: Options) -> Iterator[str]:
    if (tp := options.tp) == 1:
        return
    spec, numbers = options.spec, options.spec.sizes[options.model_size]
    for flag, given, why in (
        ("--lora", options.lora is not None, "adapters beside a layer that is split would have to be split too"),
        ("--chunked-loss", options.chunked_loss is not None, "the logits are split by words already"),
        ("--compile", options.compile, "a compiled block leaves a norm's gradient a part of the sum on each rank"),
        ("--float8", options.float8 is not None, "torchao's layers take no part of a weight"),
        ("--optimizer-state", options.optimizer_state is not None, "torchao's moments take a shard of whole rows"),
        ("--memory-checkpoint", options.memory_checkpoint is not None, "a node's copy is of ranks that shard alone"),
    ):
        if given:
            yield f"--tp {tp} with {flag}: {why}; drop one of them"
    if spec.splits is None:
        fix = f"use {'vit' if spec.kind == 'image' else 'llama'}, or drop it"
        yield f"--tp {tp} with --model {options.model}: it has no plan for splitting its layers; {fix}"
        return
    try:
        spec.splits()
        sizes = spec.split_sizes(numbers, options.seq_len)
    except ValueError as error:
        yield f"--tp {tp} with --model {options.model}: {error}; use another model, or drop --tp"
        return
    if wrong := [f"{name} {size}" for name, size in sizes.items() if size % tp]:
        common = math.gcd(*sizes.values())
        fitting = ", ".join(str(n) for n in range(2, common + 1) if common % n == 0)
        fix = f"use --tp {fitting}" if fitting else "drop --tp"
        yield f"--tp {tp} with --model-size {options.model_size}: doesn't divide {', '.join(wrong)}; {fix}"


def _sequence_parallel_refusals(options: Options) -> Iterator[str]:
    if (sp := options.sp) == 1:
        return
    spec, numbers = options.spec, options.spec.sizes[options.model_size]
    for flag, given, why in (
        ("--attention flex", options.attention == "flex", "its blocks are made of a rank's own tokens"),
        ("--compile", options.compile, "the exchange of heads would break each block's graph"),
        ("--float8", options.float8 is not None, "it isn't tried with layers in float8"),
    ):
        if given:
            yield f"--sp {sp} with {flag}: {why}; drop one of them"
    if not spec.attends_by_name:
        why = "ranks can't exchange its heads for tokens"
        yield f"--sp {sp} with --model {options.model}: {why}; use llama, or drop it"
    sizes = {"heads": numbers["heads"], "--seq-len": options.seq_len}
    parts, given = options.tp * sp, f"--sp {sp}" if options.tp == 1 else f"--sp {sp} x --tp {options.tp}"
    if wrong := [f"{name} {size}" for name, size in sizes.items() if size % parts]:
        yield f"{given} with --model-size {options.model_size}: {parts} doesn't divide {', '.join(wrong)}; lower --sp"


FSDP2 = Rules(
    honours=(
        *("cpu_offload", "replicas", "tp", "sp", "check_replicas", "memory_checkpoint", "shard_granularity"),
        *("reshard_after_forward", "explicit_prefetching", "forward_prefetch", "backward_prefetch"),
        *("grad_accumulation_sync", "inspect", "betas", "weight_decay", "optimizer_state", "float8", "lora", "ema"),
    ),
    shards_state=True,
    refusals=_fsdp2_refusals,
    reads_as_fsdp2=True,
)
STRATEGIES = ("fsdp2", *NAMES)


def rules_of(strategy: str) -> Rules:
    """The rules of a strategy, whose file is imported with them."""
    return FSDP2 if strategy == "fsdp2" else baseline(strategy)


# Options that only some strategies honour, and what the others do instead. A refusal recommends the first that does.
PARTICULAR = {
    "cpu_offload": "keeps parameters, gradients and optimizer state on the device",
    "replicas": "has no two-dimensional mesh",
    "tp": "splits no layers",
    "sp": "has whole sequences on each rank",
    "check_replicas": "isn't compared between ranks that hold the same",
    "memory_checkpoint": "has no shards of which each node could hold a whole copy",
    "shard_granularity": "has no groups of modules",
    "reshard_after_forward": "has no such policy",
    **dict.fromkeys(("explicit_prefetching", "forward_prefetch", "backward_prefetch"), "has no groups to prefetch"),
    "grad_accumulation_sync": "has no such choice",
    "inspect": "has no DTensor parameters",
    "bucket_mb": "doesn't reduce gradients in buckets of a chosen size",
    **dict.fromkeys(("fsdp1_sharding", "min_wrap_params", "fsdp1_backward_prefetch"), "isn't FSDP1"),
    **dict.fromkeys(("overlap_comm", "deepspeed_config"), "isn't DeepSpeed's"),
    "nvme_offload": "can't keep its state in files",
    "float8": "isn't tried with layers in float8",
    "optimizer_state": "isn't tried with moments in few bits",
    "betas": "is given DeepSpeed's settings",
    **dict.fromkeys(("lora", "ema"), "flattens several weights into one tensor"),
    "weight_decay": "flattens parameters, so that a norm's weight looks like any other's",
}


def check_strategy(config: Any) -> None:
    """Raises ConfigError for an option that the strategy of a Config can't honour, or honours only in another way."""
    strategy, rules = config.strategy, rules_of(config.strategy)
    for option, lack in PARTICULAR.items():
        if option in rules.honours or not asked_for(config, option):
            continue
        flag = flag_of(option)
        fitting = next(name for name in STRATEGIES if option in rules_of(name).honours)
        raise ConfigError(
            f"{flag} with --strategy {strategy}: {strategy} {rules.instead.get(option, lack)}; "
            f"use --strategy {fitting} or drop {flag}"
        )
    refuse(rules.refusals(config))


def check_world(config: Any, world_size: int) -> None:
    """Raises ConfigError for what the strategy can't do with so many ranks."""
    refuse(rules_of(config.strategy).in_world(config, world_size))


def check_device(config: Any, device_type: str) -> None:
    """Raises ConfigError for what the strategy can't do on a device, or attention, or with what is installed."""
    import torch

    from fsdp2.models.attention import missing

    refuse(rules_of(config.strategy).on_device(config, device_type))
    refuse(attention_refusals(config, device_type))
    if config.attention == "flex" and (lacks := missing()) is not None:
        raise ConfigError(f"--attention flex: it has to be compiled, and {lacks} is missing; install it, or use auto")
    if config.float8 and device_type == "cuda" and torch.cuda.get_device_capability() < FLOAT8_CAPABILITY:
        raise ConfigError(
            f"--float8 {config.float8}: {torch.cuda.get_device_name()} has no float8 products, which came with Ada and "
            "Hopper (compute capability 8.9); drop it"
        )
    if config.attention == "cudnn" and not torch.backends.cudnn.is_available():
        raise ConfigError("--attention cudnn: this torch has no cuDNN; use --attention auto")


def refuse(refusals: Iterator[str]) -> None:
    """Raises ConfigError with the first refusal, if there is one."""
    for refusal in refusals:
        raise ConfigError(refusal)


def asked_for(config: Any, option: str) -> bool:
    """Return whether an option asks for something: it differs from its default and isn't `off`."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return getattr(config, option) not in (defaults[option], "off")

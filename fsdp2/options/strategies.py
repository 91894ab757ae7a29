"""Which flags a strategy honours, and what the others lack. A flag that would do nothing is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdp2.options.errors import ConfigError, flag_of

ZERO = ("zero1", "zero2", "zero3")
STRATEGIES = ("fsdp2", "fsdp1", "ddp", *ZERO, "none")


@dataclass(frozen=True)
class Rule:
    """Options that only some strategies honour; the first of those is the one that a refusal recommends."""

    options: tuple[str, ...]
    honoured_by: tuple[str, ...]
    others: str  # what a strategy that doesn't honour them does instead
    further: tuple[tuple[str, str], ...] = ()  # (strategy, what that one does instead), where it is something else

    def why_not(self, strategy: str) -> str:
        return dict(self.further).get(strategy, self.others)


RULES = (
    Rule(("cpu_offload",), ("fsdp2", "fsdp1", *ZERO), "keeps parameters, gradients and optimizer state on the device"),
    Rule(("replicas",), ("fsdp2", "fsdp1"), "has no two-dimensional mesh"),
    Rule(("shard_granularity",), ("fsdp2", "fsdp1"), "has no groups of modules"),
    Rule(
        ("reshard_after_forward",),
        ("fsdp2",),
        "has no such policy",
        (("fsdp1", "chooses this by its sharding strategy (--fsdp1-sharding shard-grad-op is false)"),),
    ),
    Rule(
        ("explicit_prefetching", "forward_prefetch", "backward_prefetch"),
        ("fsdp2",),
        "has no groups to prefetch",
        (("fsdp1", "has no explicit schedule (--fsdp1-backward-prefetch is its own)"),),
    ),
    Rule(("inspect",), ("fsdp2",), "has no DTensor parameters"),
    Rule(("bucket_mb",), ("ddp", *ZERO), "doesn't reduce gradients in buckets of a chosen size"),
    Rule(("fsdp1_sharding", "min_wrap_params", "fsdp1_backward_prefetch"), ("fsdp1",), "isn't FSDP1"),
    Rule(("overlap_comm", "deepspeed_config"), ZERO, "isn't DeepSpeed's"),
    Rule(("nvme_offload",), ("zero3",), "can't keep its state in files"),
)


def check_strategy(config: Any) -> None:
    """Raises ConfigError for an option that the strategy of a Config can't honour, or honours only otherwise."""
    strategy = config.strategy
    for rule in RULES:
        if strategy in rule.honoured_by:
            continue
        for option in given(config, rule.options):
            flag = flag_of(option)
            raise ConfigError(
                f"{flag} with --strategy {strategy}: {strategy} {rule.why_not(strategy)}; "
                f"use --strategy {rule.honoured_by[0]} or drop {flag}"
            )
    if strategy == "fsdp2" and config.shard_granularity == "root" and config.prefetches != (None, None):
        raise ConfigError(
            "--explicit-prefetching with --shard-granularity root: one group has nothing to prefetch; drop one of them"
        )
    if strategy == "fsdp1":
        _check_fsdp1(config)
    if strategy in ZERO:
        _check_zero(config)


def given(config: Any, options: tuple[str, ...]) -> Iterator[str]:
    """Those of the options that ask for something: that differ from their default and aren't `off`."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return (option for option in options if getattr(config, option) not in (defaults[option], "off"))


def _check_fsdp1(config: Any) -> None:
    if config.shard_granularity not in (1, "root"):
        raise ConfigError(
            f"--shard-granularity {config.shard_granularity} with --strategy fsdp1: a policy of its wraps one module "
            "at a time; use 1 (each block), root, or --min-wrap-params N"
        )
    if config.min_wrap_params is not None and config.shard_granularity != 1:
        raise ConfigError(
            f"--min-wrap-params with --shard-granularity {config.shard_granularity}: both say what is wrapped; "
            "drop one of them"
        )
    hybrid = config.fsdp1_sharding.startswith("hybrid")
    if hybrid != (config.replicas > 1):
        raise ConfigError(
            f"--fsdp1-sharding {config.fsdp1_sharding} with --replicas {config.replicas}: "
            + ("a hybrid has 2 replicas or more" if hybrid else "only hybrid-shard and hybrid-shard-zero2 replicate")
            + "; change one of them"
        )
    if config.dcp_api:
        # Measured: FSDP1's FULL_STATE_DICT fails on CPU before torch 2.15 and crashes the process on 2.11.
        raise ConfigError(
            "--dcp-api with --strategy fsdp1: the DCP API uses FSDP1's full state dict, which crashes on CPU in "
            "torch 2.11; drop --dcp-api or use --strategy fsdp2"
        )


def _check_zero(config: Any) -> None:
    if config.compile:
        raise ConfigError(
            f"--compile with --strategy {config.strategy}: DeepSpeed's hooks inside of compiled blocks break their "
            "graphs; use --strategy fsdp2 or drop --compile"
        )
    if config.on_nonfinite == "skip":
        raise ConfigError(
            f"--on-nonfinite skip with --strategy {config.strategy}: DeepSpeed tells the gradients' norm only after "
            "its step; use --on-nonfinite stop or --strategy fsdp2"
        )
    if config.nvme_offload is not None and config.cpu_offload:
        raise ConfigError("--nvme-offload with --cpu-offload: both say where the state is kept; drop one of them")
    if config.async_checkpoint is not None:
        raise ConfigError(
            f"--async-checkpoint with --strategy {config.strategy}: bringing the flat shards into the form of a "
            "checkpoint takes the time, and training waits for that; use --strategy fsdp2 or drop --async-checkpoint"
        )
    if config.resume_partial:
        raise ConfigError(
            f"--resume-partial with --strategy {config.strategy}: its parameters are in flat shards; load the weights "
            "with --strategy fsdp2 --max-steps 1, and go on from there, or drop --resume-partial"
        )

"""The rows of a comparison: each strategy with each named set of flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError, shown, unknown

# Most names are of https://docs.ray.io/en/latest/train/examples/pytorch/pytorch-fsdp/README.html; sizes of `wrap` are
# those of https://docs.pytorch.org/tutorials/intermediate/FSDP1_tutorial.html.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "no-reshard": {"reshard_after_forward": False},
    "reshard": {"reshard_after_forward": True},
    "root": {"shard_granularity": "root"},
    "pairs": {"shard_granularity": 2},
    "wrap": {"min_wrap_params": 20000},
    "wrap-100": {"min_wrap_params": 100},
    "fused": {"fused_optimizer": True},
    "offload": {"cpu_offload": True},
    "fp16": {"mixed_precision": "fp16"},
    "bf16": {"mixed_precision": "bf16"},
    "hsdp": {"replicas": 2},
    "tp": {"tp": 2},
    "sp": {"sp": 2},
    "recompute": {"activation_checkpointing": "block"},
    "all": {"reshard_after_forward": True, "cpu_offload": True, "mixed_precision": "fp16"},
}


@dataclass(frozen=True)
class Row:
    """One line of the comparison: a training that can be started, or why it can't."""

    name: str
    ranks: int
    config: Config | None
    refused: str | None = None


def rows(strategies: Sequence[str], variants: Sequence[str], training: Mapping[str, Any], ranks: int) -> list[Row]:
    """Each strategy with each variant. What a strategy can't do becomes a row that says why.

    Raises ConfigError if the training's own flags make no sense, or a variant has no such name.
    """
    for variant in variants:
        if variant not in VARIANTS:
            raise ConfigError(f"--variants {shown(variant)}: {unknown(shown(variant), list(VARIANTS))}")
    # Parsed once before the rows, so that a wrong flag ends it rather than failing every row.
    plain = Config(**{**training, "strategy": "fsdp2"})
    return [_row(strategy, variant, training, ranks, plain) for strategy in strategies for variant in variants]


def _row(strategy: str, variant: str, training: Mapping[str, Any], ranks: int, plain: Config) -> Row:
    name = strategy if variant == "default" else f"{strategy} {variant}"
    values = {**training, **VARIANTS[variant], "strategy": strategy}
    # Ranks that have the same samples have as many as they would have apart: the same global batch.
    sharing = VARIANTS[variant].get("tp", 1) * VARIANTS[variant].get("sp", 1)
    if sharing > 1:
        values["batch_size"] = plain.batch_size * sharing
    if strategy == "none":
        # One process that computes the ranks' parts one after the other: the same global batch.
        values["grad_accumulation"] = min(plain.accumulation(ranks) * ranks, plain.global_batch_size or 2**16)
        ranks = 1
    try:
        return Row(name, ranks, Config(**values))
    except ConfigError as error:
        return Row(name, ranks, None, str(error))

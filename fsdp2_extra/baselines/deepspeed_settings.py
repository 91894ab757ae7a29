"""DeepSpeed's configuration of a run: made from the flags, and overridden by `--deepspeed-config`."""

from __future__ import annotations

from typing import Any

from fsdp2.options.errors import ConfigError, shown
from fsdp2.options.settings_file import parse_json, read_bytes
from fsdp2_extra.baselines.zero_settings import deepspeed_config

BUCKET_MB = 25.0  # where --bucket-mb is unset; DDP has the same by torch's own rule


def settings(config: Any, device_type: str) -> dict[str, Any]:
    """Make DeepSpeed's settings for a Config. Raises ConfigError if the file can't be read or contradicts the flags."""
    made = deepspeed_config(
        int(config.strategy[-1]),
        micro_batch=config.batch_size,
        clip=config.clip_grad_norm,
        precision=config.mixed_precision,
        reduce_dtype=config.reduce_dtype,
        cpu_offload=config.cpu_offload,
        nvme_offload=config.nvme_offload,
        bucket_mb=config.bucket_mb or BUCKET_MB,
        overlap_comm=config.overlap_comm,
        device_type=device_type,
    )
    if config.deepspeed_config is None:
        return made
    flag = f"--deepspeed-config {shown(config.deepspeed_config)}"
    try:
        given = parse_json(read_bytes(config.deepspeed_config))
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f'{flag}: must hold a table of settings, such as {{"zero_optimization": {{…}}}}')
    for key, value in given.items():
        if not isinstance(value, dict) and (isinstance(made.get(key), dict) or key in ("bf16", "fp16")):
            raise ConfigError(f"{flag}: {key} must be a table, and not {shown(value)}")
    # A table of its replaces ours key by key, so that what it doesn't mention stays as the flags say.
    merged = {**made, **{key: _over(made.get(key), value) for key, value in given.items()}}
    for key, ours, flags in (
        ("gradient_accumulation_steps", 1, "--grad-accumulation, since the loop accumulates"),
        ("train_batch_size", None, "--batch-size"),
        ("optimizer", None, "--optimizer"),
        ("scheduler", None, "--gamma"),
    ):
        if merged.get(key) != ours:
            raise ConfigError(f"{flag}: sets {key}, which is a flag's here; drop it there and use {flags}")
    if merged["zero_optimization"]["stage"] != made["zero_optimization"]["stage"]:
        stage = shown(merged["zero_optimization"]["stage"])
        raise ConfigError(f"{flag}: is for stage {stage}; use --strategy zero{stage} or change the file")
    for name in ("bf16", "fp16"):
        if merged.get(name, {}).get("enabled", False) != (config.mixed_precision == name):
            raise ConfigError(f"{flag}: sets {name} other than --mixed-precision does; drop it there")
    return merged


def _over(ours: Any, theirs: Any) -> Any:
    return {**ours, **theirs} if isinstance(ours, dict) and isinstance(theirs, dict) else theirs

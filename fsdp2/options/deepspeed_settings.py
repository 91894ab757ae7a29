"""DeepSpeed's configuration of a run: made from the flags, and overridden by `--deepspeed-config`."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError, shown
from fsdp2.options.settings_file import parse_json, read_bytes
from fsdp2.parallel.zero import choose_accelerator, deepspeed_config

BUCKET_MB = 25.0  # where --bucket-mb is unset; DDP has the same by torch's own rule


def settings(config: Config, device_type: str) -> dict[str, Any]:
    """The dictionary that DeepSpeed gets. Raises ConfigError if the file can't be read or contradicts the flags."""
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


def check_installed(config: Config, device_type: str) -> None:
    """Raises ConfigError if DeepSpeed, or what it builds itself with, isn't there, or can't do it on the device."""
    flag = f"--strategy {config.strategy}"
    if device_type == "cpu" and config.mixed_precision == "fp16":
        raise ConfigError(
            f"--mixed-precision fp16 with {flag} on the CPU: DeepSpeed has no fp16 there; use bf16, or --strategy fsdp2"
        )
    if device_type == "cpu" and config.nvme_offload is not None and config.mixed_precision != "bf16":
        # Seen: zero.Init takes bf16 for the dtype of its files wherever the device has no fp16, and rounds fp32 to it.
        raise ConfigError(
            f"--nvme-offload {config.nvme_offload} on the CPU: DeepSpeed keeps parameters in files of bf16 there, and "
            "would round fp32 ones without a word; add --mixed-precision, or use --cpu-offload"
        )
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            f"{flag}: DeepSpeed isn't installed; after torch, pip install --no-build-isolation "
            "'fsdp2-reference[deepspeed]'"
        )
    if config.nvme_offload is not None:
        _check_file_io(config.nvme_offload, device_type)
    if device_type == "cpu":
        missing = [tool for tool in (os.environ.get("CXX", "g++"), "ninja") if shutil.which(tool) is None]
        if missing:
            raise ConfigError(
                f"{flag}: DeepSpeed builds its communication for the CPU when it is first used, and "
                f"{' and '.join(missing)} can't be found; install what is missing"
            )


def _check_file_io(folder: str, device_type: str) -> None:
    choose_accelerator(device_type)
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise ConfigError(
            f"--nvme-offload {folder}: DeepSpeed builds its file I/O with libaio, whose header or library can't be "
            "found; install libaio-dev, or say where they are in CFLAGS and LDFLAGS"
        )

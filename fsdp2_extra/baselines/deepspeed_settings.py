"""DeepSpeed's configuration of a run: made from the flags, and overridden by `--deepspeed-config`."""

from __future__ import annotations

from typing import Any

from fsdp2.options.errors import ConfigError, refused, shown
from fsdp2.options.settings_file import parse_json, read_bytes

MIB_OF_FP32 = 1024 * 1024 // 4
BUCKET_MB = 25.0  # where --bucket-mb is unset; DDP has the same by torch's own rule


def settings(config: Any, device_type: str) -> dict[str, Any]:
    """Make DeepSpeed's settings for a Config. Raises ConfigError if the file can't be read or contradicts the flags."""
    made = _of_flags(config, device_type)
    if config.deepspeed_config is None:
        return made
    flag = f"--deepspeed-config {shown(config.deepspeed_config)}"
    with refused(flag):
        given = parse_json(read_bytes(config.deepspeed_config))
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


def _of_flags(config: Any, device_type: str) -> dict[str, Any]:
    """See https://www.deepspeed.ai/docs/config-json/."""
    stage = int(config.strategy[-1])
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": config.overlap_comm}
    if stage == 3:
        # Its own linear layer, put in torch's place, rounds a product before it adds the bias: in bf16 the model would
        # evaluate differently here than in inference. Torch's keeps no copy of the parameters either.
        zero["memory_efficient_linear"] = False
    # DeepSpeed's own is 500 million elements, allocated whole in each backward: 2 GB, however small the model.
    elements = max(1, int((config.bucket_mb or BUCKET_MB) * MIB_OF_FP32))
    zero |= {"reduce_bucket_size": elements}
    zero |= {"stage3_prefetch_bucket_size": elements} if stage == 3 else {"allgather_bucket_size": elements}
    if config.cpu_offload:
        device = {"device": "cpu", "pin_memory": device_type == "cuda"}
        zero |= {"offload_optimizer": device, **({"offload_param": device} if stage == 3 else {})}
    if config.nvme_offload is not None:
        device = {"device": "nvme", "nvme_path": config.nvme_offload, "pin_memory": device_type == "cuda"}
        zero |= {"offload_optimizer": device, "offload_param": device}
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.batch_size,
        # The loop says which microbatch is the last, and scales each loss: DeepSpeed must not do so again.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.clip_grad_norm or 0.0,  # 1.0 if it isn't mentioned
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # ours are torch's own
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
    if config.mixed_precision is not None:
        made[config.mixed_precision] = {"enabled": True}
        made["communication_data_type"] = config.reduce_dtype  # else gradients are summed in the compute dtype
    if config.mixed_precision == "fp16":
        # The rule of torch's GradScaler: twice as much after 2000 good steps, half at once after a bad one.
        made["fp16"] |= {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
    return made


def _over(ours: Any, theirs: Any) -> Any:
    return {**ours, **theirs} if isinstance(ours, dict) and isinstance(theirs, dict) else theirs

"""DeepSpeed's configuration for our flags, and what it refuses."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

from fsdp2.parallel.rules import Options
from fsdp2.units import install

MIB_OF_FP32 = 1024 * 1024 // 4


def deepspeed_config(
    stage: int,
    *,
    micro_batch: int,
    clip: float | None,
    precision: str | None,
    reduce_dtype: str,
    cpu_offload: bool,
    nvme_offload: str | None,
    bucket_mb: float,
    overlap_comm: bool,
    device_type: str,
) -> dict[str, Any]:
    """DeepSpeed's configuration for our flags; see https://www.deepspeed.ai/docs/config-json/."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": overlap_comm}
    if stage == 3:
        # Its own linear layer, put in torch's place, rounds a product before it adds the bias: in bf16 the model would
        # evaluate differently here than in inference. Torch's keeps no copy of the parameters either.
        zero["memory_efficient_linear"] = False
    # DeepSpeed's own is 500 million elements, allocated whole in each backward: 2 GB, however small the model.
    elements = max(1, int(bucket_mb * MIB_OF_FP32))
    zero |= {"reduce_bucket_size": elements}
    zero |= {"stage3_prefetch_bucket_size": elements} if stage == 3 else {"allgather_bucket_size": elements}
    if cpu_offload:
        device = {"device": "cpu", "pin_memory": device_type == "cuda"}
        zero |= {"offload_optimizer": device, **({"offload_param": device} if stage == 3 else {})}
    if nvme_offload is not None:
        device = {"device": "nvme", "nvme_path": nvme_offload, "pin_memory": device_type == "cuda"}
        zero |= {"offload_optimizer": device, "offload_param": device}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        # The loop says which microbatch is the last, and scales each loss: DeepSpeed must not do so again.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip or 0.0,  # 1.0 if it isn't mentioned
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # ours are torch's own
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
    if precision is not None:
        config[precision] = {"enabled": True}
        config["communication_data_type"] = reduce_dtype  # else gradients are summed in the compute dtype
    if precision == "fp16":
        # The rule of torch's GradScaler: twice as much after 2000 good steps, half at once after a bad one.
        config["fp16"] |= {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
    return config


def choose_accelerator(device_type: str) -> None:
    """To be called before DeepSpeed is imported, which reads it then: it would take a GPU where there is one."""
    os.environ.setdefault("DS_ACCELERATOR", device_type)


def refusals(options: Options) -> Iterator[str]:
    """A line for each combination of flags that DeepSpeed can't honour."""
    if options.compile:
        yield (
            f"--compile with --strategy {options.strategy}: DeepSpeed's hooks inside of compiled blocks break their "
            "graphs; use --strategy fsdp2 or drop --compile"
        )
    if options.on_nonfinite == "skip":
        yield (
            f"--on-nonfinite skip with --strategy {options.strategy}: DeepSpeed tells the gradients' norm only after "
            "its step; use --on-nonfinite stop or --strategy fsdp2"
        )
    if options.nvme_offload is not None and options.cpu_offload:
        yield "--nvme-offload with --cpu-offload: both say where the state is kept; drop one of them"
    if options.async_checkpoint is not None:
        yield (
            f"--async-checkpoint with --strategy {options.strategy}: bringing the flat shards into the form of a "
            "checkpoint takes the time, and training waits for that; use --strategy fsdp2 or drop --async-checkpoint"
        )
    if options.resume_partial:
        yield (
            f"--resume-partial with --strategy {options.strategy}: its parameters are in flat shards; load the weights "
            "with --strategy fsdp2 --max-steps 1, and go on from there, or drop --resume-partial"
        )


def on_device(options: Options, device_type: str) -> Iterator[str]:
    """Refusals where DeepSpeed, or what it builds itself with, isn't there, or can't do it on the device."""
    flag = f"--strategy {options.strategy}"
    if device_type == "cpu" and options.mixed_precision == "fp16":
        yield (
            f"--mixed-precision fp16 with {flag} on the CPU: DeepSpeed has no fp16 there; use bf16, or --strategy fsdp2"
        )
    if device_type == "cpu" and options.nvme_offload is not None and options.mixed_precision != "bf16":
        # Seen: zero.Init takes bf16 for the dtype of its files wherever the device has no fp16, and rounds fp32 to it.
        yield (
            f"--nvme-offload {options.nvme_offload} on the CPU: DeepSpeed keeps parameters in files of bf16 there, and "
            "would round fp32 ones without a word; add --mixed-precision, or use --cpu-offload"
        )
    if importlib.util.find_spec("deepspeed") is None:
        needed = install("deepspeed").replace("pip install", "pip install --no-build-isolation")
        yield f"{flag}: DeepSpeed isn't installed; after torch, {needed}"
    if options.nvme_offload is not None and not _has_file_io(device_type):
        yield (
            f"--nvme-offload {options.nvme_offload}: DeepSpeed builds its file I/O with libaio, whose header or "
            "library can't be found; install libaio-dev, or say where they are in CFLAGS and LDFLAGS"
        )
    if device_type == "cpu":
        missing = [tool for tool in (os.environ.get("CXX", "g++"), "ninja") if shutil.which(tool) is None]
        if missing:
            yield (
                f"{flag}: DeepSpeed builds its communication for the CPU when it is first used, and "
                f"{' and '.join(missing)} can't be found; install what is missing"
            )
    options.deepspeed_settings(device_type)


def _has_file_io(device_type: str) -> bool:
    choose_accelerator(device_type)
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))

"""DeepSpeed's refusals: flags that it can't honour, and places where it can't be used."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator

from fsdp2.parallel.rules import Options
from fsdp2.units import install
from fsdp2_extra.baselines.deepspeed_settings import settings


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
    settings(options, device_type)


def _has_file_io(device_type: str) -> bool:
    choose_accelerator(device_type)
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))

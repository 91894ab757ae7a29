"""The contents of a checkpoint's marker beside its files.

They are flags, the environment, the model's names and shapes, and hashes of the files that decide what weights mean.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp2.checkpoint import meaning
from fsdp2.config import Config
from fsdp2.options.parser import to_flags


def environment(world_size: int) -> dict[str, Any]:
    """Versions and sizes that a reader of the results will ask for."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": version("torchvision"),
        "git": _git_revision(),
        "world_size": world_size,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


@functools.cache
def _git_revision() -> str | None:
    line, where = ["git", "describe", "--always", "--dirty"], Path(__file__).parent
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(line, cwd=where, capture_output=True, text=True, timeout=10).stdout.strip() or None
    return None


def shapes_of(model: nn.Module) -> dict[str, list[int]]:
    """Name -> shape of everything in a model's state dict."""
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


def checkpoint_info(config: Config, world_size: int) -> dict[str, Any]:
    """Make what a checkpoint's marker says beside its files."""
    model, adapters = config.spec.described(config.model_size), dict[str, Any]()
    if config.spec.lora is not None:
        from fsdp2_extra.models import lora

        # Their scale isn't in their tensors.
        adapters = {"adapters": json.loads(config.spec.files(config.model_size)[lora.FILE])}
    return {
        "config": to_flags(config),
        "mesh": {"replicate": config.replicas, "shard": world_size // (config.replicas * config.tp), "tp": config.tp},
        "environment": environment(world_size),
        "model": shapes_of(model),  # another model is recognised before anything is loaded
        **{part: meaning.hashes(files) for part, files in kept_files(config).items()},
        **adapters,
    }


def kept_files(config: Config) -> dict[str, dict[str, bytes]]:
    """The parts of a marker for files that a run keeps -> name -> content. Of adapters it has what they mean.

    A model's own tokenizer is among its files. The one of `--tokenizer` is apart, so that the model stays as it was:
    which token hides others, the tokenizer in its folder says, whichever one reads the text.
    """
    files, spec = dict(config.spec.files(str(config.model_size))), config.spec
    if spec.lora is not None:
        from fsdp2_extra.models import lora

        files.pop(lora.FILE)
    if config.tokenizer in (None, "bytes"):
        return {meaning.PART: files}
    from fsdp2_extra.text.tokenizer_file import tokenizer_files

    return {meaning.PART: files, meaning.TOKENIZER: tokenizer_files(str(config.tokenizer))}

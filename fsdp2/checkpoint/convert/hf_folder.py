"""A folder that `from_pretrained` loads: config.json, safetensors under Hugging Face's names, the tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.spool import spool


def write_hf(
    folder: Path,
    tensors: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    model: Any,
    beside: Mapping[str, bytes],
    max_shard_size: int,
) -> None:
    """Fill an empty folder, by the model's own `save_pretrained`.

    It knows under which names and in which shapes the hub has an architecture's weights, such as a matrix for each
    expert of what the model holds as one tensor, and writes what is tied once. The tensors are mapped from a temporary
    file meanwhile, so that no more than one is in memory.

    Args:
        tensors: name -> tensor on `meta`.
        read: name -> that tensor on the CPU, contiguous.
        model: of transformers, on meta.
        beside: name -> content of a file.

    Raises Refused if the tensors aren't those of the model.
    """
    same = dict(zip(tensors, tensors, strict=True))  # name -> the name that it is read by
    for names in _tied(model):  # of which a file may have one alone
        if known := [name for name in names if name in tensors]:
            same |= {name: known[0] for name in names if name not in tensors}
    tensors = {name: tensors[known] for name, known in same.items()}
    if wrong := sorted(tensors.keys() ^ model.state_dict().keys()):
        raise Refused(f"--format hf: the weights aren't those of {type(model).__name__}: {', '.join(wrong[:3])} differ")
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    model.config.dtype = dtypes.pop() if len(dtypes) == 1 else None
    for name, content in beside.items():
        (folder / name).write_bytes(content)
    state = spool(tensors, lambda name: read(same[name]), folder)
    model.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)
    for file in folder.iterdir():
        with open(file, "rb") as written:
            os.fsync(written.fileno())


def _tied(model: Any) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())

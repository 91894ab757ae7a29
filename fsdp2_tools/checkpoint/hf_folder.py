"""A folder that `from_pretrained` loads: config.json, safetensors under Hugging Face's names, the tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.sources.source import Source
from fsdp2.checkpoint.spool import spool
from fsdp2.parallel.meta import shared_names
from fsdp2_extra.models.hf_config import RETURNED
from fsdp2_extra.models.hf_load import without_bars


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
    expert of what the model holds as one tensor. The tensors are mapped from a temporary
    file meanwhile, so that no more than one is in memory.

    Args:
        tensors: name -> tensor on `meta`.
        read: name -> that tensor on the CPU, contiguous.
        model: of transformers, on meta.
        beside: name -> content of a file.

    Raises Refused if the tensors, by name and shape, aren't those of the model. Of what is tied, one is enough.
    """
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    absent = {name for names in tied(model) if tensors.keys() & names for name in names} - tensors.keys()
    if wrong := sorted(tensors.keys() ^ (shapes.keys() - absent)):
        raise Refused(f"--format hf: the weights aren't those of {type(model).__name__}: {', '.join(wrong[:3])} differ")
    if other := next((name for name, tensor in tensors.items() if tensor.shape != shapes[name]), None):
        ours, said = list(tensors[other].shape), list(shapes[other])
        raise Refused(f"--format hf: {other} is {ours}, and config.json makes it {said}; use --format safetensors")
    for name, content in beside.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    with without_bars():
        model.save_pretrained(folder, state_dict=spool(tensors, read, folder), max_shard_size=max_shard_size)
    # They say the dtype of the model, which lies on meta in fp32, and not that of the tensors; and that it is trained
    # without keys and values, which generating needs.
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    dtype = str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None
    for file in (folder / "config.json", folder / "generation_config.json"):
        if file.name == "generation_config.json" and file.name in beside:
            file.write_bytes(beside[file.name])  # of which a model made by config.json alone knows nothing
        elif file.exists():
            written = json.loads(file.read_bytes())
            _as_before(written, json.loads(beside.get(file.name, b"{}")))
            _say(written, dtype)
            file.write_text(json.dumps(written, indent=2) + "\n")
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())


def _as_before(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Let a configuration and its parts say of what a forward returns what they said before the model was trained."""
    for name in [name for name in {**now, **before} if RETURNED.fullmatch(name)]:
        now.pop(name, None)
        now |= {name: before[name]} if name in before else {}
    for name, part in now.items():
        if isinstance(part, dict):
            _as_before(part, before[name] if isinstance(before.get(name), dict) else {})


def _say(config: dict[str, Any], dtype: str | None) -> None:
    """Let a configuration and those of its parts name this dtype, or none where tensors differ."""
    if "dtype" in config or "torch_dtype" in config:
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    for part in config.values():
        if isinstance(part, dict):
            _say(part, dtype)


def dtype_of(config: bytes) -> str | None:
    """The dtype of the weights by a config.json, such as `bfloat16`; None where it names none."""
    said = json.loads(config)
    parts = [said, *(part for part in said.values() if isinstance(part, dict))]
    found = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return next((one.removeprefix("torch.") for one in found if isinstance(one, str)), None)


def tied(model: Any) -> list[list[str]]:
    """The names of each parameter that has several."""
    return [names for names in shared_names(model) if len(names) > 1]


def without_copies(source: Source, names: Mapping[str, str], model: Any) -> dict[str, str]:
    """Plain name -> name in the source, without those of a tied tensor but its first. Raises Refused if they differ."""
    left = dict(names)
    for several in tied(model):
        first, *others = [name for name in several if name in left] or [""]
        for name in others:
            if not torch.equal(source.read(left[first]), source.read(left[name])):
                raise Refused(
                    f"{source.place}: {first} and {name} differ, and config.json says that they are one tensor; use "
                    "--format pt"
                )
            del left[name]
    return left

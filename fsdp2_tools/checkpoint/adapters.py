"""Adapters of a checkpoint: as peft's folder, or added to the weights that they go beside."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from fsdp2.checkpoint.files import LocalFiles, is_there
from fsdp2.checkpoint.refusal import Refused, is_name, one_line
from fsdp2.checkpoint.sources.safetensors_files import write_file
from fsdp2.checkpoint.sources.source import Source, weights
from fsdp2.checkpoint.store import MARKER, read_marker

FILE = "adapter_config.json"  # peft's name
_BASE = "base_model_name_or_path"
_LARGEST = 10**6  # as --lora-alpha allows
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


@dataclass(frozen=True)
class Adapters:
    """The content of an adapter_config.json.

    Attributes:
        content: of the file.
        base: where the weights are that the adapters go beside.
        scale: B A counts so many times.
        transposed: whether those weights are (in, out).
    """

    content: bytes
    base: str
    scale: float
    transposed: bool


def read_adapters(content: bytes, place: str) -> Adapters:
    """Raises Refused for what isn't as a run writes it."""
    try:
        facts = json.loads(content)
        base, transposed, rank, alpha = (facts[key] for key in (_BASE, "fan_in_fan_out", "r", "lora_alpha"))
        if not (isinstance(base, str) and is_name(base)):
            raise ValueError(f"{_BASE} is no name")
        if type(transposed) is not bool:
            raise TypeError("fan_in_fan_out is no true or false")
        if type(rank) is not int or not 0 < rank <= _LARGEST:
            raise ValueError(f"r is no whole number from 1 to {_LARGEST}")
        if type(alpha) not in (int, float) or not 0 < alpha <= _LARGEST:
            raise ValueError(f"lora_alpha is no number above 0, and up to {_LARGEST}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(f"{place}: {FILE} can't be used ({one_line(error)})") from None
    return Adapters(content, base, alpha / rank, transposed)


def vouched(adapters: Adapters, source: Source) -> Adapters:
    """The adapters as the marker of their checkpoint says; where the base is, says the file.

    The marker of an earlier version has the flags of the run alone. Raises Refused where it and the file differ.
    """
    if source.folder is None or not is_there(source.folder, MARKER):
        return adapters
    marker = read_marker(source.folder)
    flags, kept = marker.get("config", {}), marker.get("adapters")
    file = json.loads(adapters.content)
    if kept is None:
        rank = flags.get("lora")
        if type(rank) is not int:
            return adapters
        kept = {**file, "r": rank, "lora_alpha": flags.get("lora-alpha") or 2.0 * rank}
    kept = {**kept, _BASE: adapters.base}
    for key in ("r", "lora_alpha", "fan_in_fan_out"):
        if kept.get(key) != file[key]:
            raise Refused(
                f"{source.place}: {FILE} of its run says {key} {file[key]}, and {MARKER} of the checkpoint "
                f"{kept.get(key)}; put the file back that the run wrote"
            )
    return read_adapters((json.dumps(kept, indent=1) + "\n").encode(), source.place)


def write_peft(
    folder: LocalFiles, adapters: Adapters, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor]
) -> None:
    """Fill an empty folder with what `PeftModel.from_pretrained(model, folder)` reads."""
    names = {f"base_model.model.{name.replace('.default.', '.')}": name for name in tensors}
    named = {theirs: tensors[ours] for theirs, ours in names.items()}
    write_file(folder, "adapter_model.safetensors", named, lambda name: read(names[name]))
    folder.write(FILE, adapters.content)
    folder.fsync(FILE)


def merged(source: Source, base: Source, adapters: Adapters) -> Source:
    """All weights of the base, and in each that has adapters (out, in) + scale x B A, in its own dtype.

    A is (rank, in) and B (out, rank). Source: https://arxiv.org/abs/2106.09685

    Raises Refused if the adapters aren't of these weights.
    """
    ours, theirs = weights(source), weights(base)
    layers = {f"{name.removesuffix(_A)}.weight": name.removesuffix(_A) for name in ours if name.endswith(_A)}
    if absent := sorted(layers.keys() - theirs.keys()):
        raise Refused(
            f"{source.place}: {base.place} has no {absent[0]}, which the adapters go beside; use --format peft, and "
            "load both, unmerged, with PeftModel.from_pretrained"
        )

    def read(name: str) -> Tensor:
        weight: Tensor = base.read(theirs[name])
        if name not in layers:
            return weight
        a, b = (source.read(ours[layers[name] + end]).double() for end in (_A, _B))
        change = (b @ a).T if adapters.transposed else b @ a
        if change.shape != weight.shape:
            raise Refused(
                f"{source.place}: the adapters of {name} are for {tuple(change.shape)}, and {base.place} has "
                f"{tuple(weight.shape)}"
            )
        return (weight.double() + adapters.scale * change).to(weight.dtype)

    tensors = {name: base.tensors[original] for name, original in theirs.items()}
    return Source(source.place, tensors, [], {name: (name,) for name in tensors}, read)

"""Adapters of a checkpoint: as peft's folder, or added to the weights that they go beside."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp2.checkpoint.files import LocalFiles, is_there
from fsdp2.checkpoint.refusal import Refused, is_name, one_line
from fsdp2.checkpoint.sources.safetensors_files import write_file
from fsdp2.checkpoint.sources.source import Source, weights
from fsdp2.checkpoint.store import MARKER, read_marker
from fsdp2.run.parts import checksum
from fsdp2_extra.models.lora import FILE, base_name, is_adapter

_BASE = "base_model_name_or_path"
_CHECKSUM = "app.base.checksum"
_LARGEST = 10**6  # as --lora-alpha allows
_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"
# What a run says there of its adapters. peft has fifteen other settings by which the same tensors mean something else:
# they are as peft has them by default, which for those that aren't here is empty.
_SAID = (_BASE, "fan_in_fan_out", "r", "lora_alpha", "target_modules")
_ASIDE = (_BASE, "inference_mode", "peft_version", "task_type", "lora_dropout")  # which change no merged weight
TASKS = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}  # of a model -> as peft calls it
ALONE = {
    "causal": "AutoPeftModelForCausalLM",
    "seq2seq": "AutoPeftModelForSeq2SeqLM",
}  # peft's class that needs no model
_DEFAULTS = {"peft_type": "LORA", "bias": "none", "init_lora_weights": True}
_DEFAULTS |= {"megatron_core": "megatron.core", "qalora_group_size": 16, "layers_to_transform": None}


@dataclass(frozen=True)
class Adapters:
    """The content of an adapter_config.json.

    Attributes:
        content: of the file.
        base: where the weights are that the adapters go beside.
        rank: of the product B A.
        scale: that product counts so many times.
        targets: the ends of the names of layers that have adapters.
        transposed: whether the weights of those are (in, out).
    """

    content: bytes
    base: str
    rank: int
    scale: float
    targets: tuple[str, ...]
    transposed: bool


def read_adapters(content: bytes, place: str) -> Adapters:
    """Raises Refused for what isn't as a run writes it."""
    try:
        facts = json.loads(content)
        base, transposed, rank, alpha, targets = (facts[key] for key in _SAID)
        if not (isinstance(base, str) and is_name(base)):
            raise ValueError(f"{_BASE} is no name")
        if type(transposed) is not bool:
            raise TypeError("fan_in_fan_out is no true or false")
        if type(rank) is not int or not 0 < rank <= _LARGEST:
            raise ValueError(f"r is no whole number from 1 to {_LARGEST}")
        if type(alpha) not in (int, float) or not 0 < alpha <= _LARGEST:
            raise ValueError(f"lora_alpha is no number above 0, and up to {_LARGEST}")
        if type(dropped := facts.get("lora_dropout", 0.0)) not in (int, float) or not 0 <= dropped < 1:
            raise ValueError("lora_dropout is no number from 0 to below 1")
        if facts.get("task_type") not in (None, *TASKS.values()):
            raise ValueError(f"task_type is none of {', '.join(TASKS.values())}")
        if not (isinstance(targets, list) and all(isinstance(one, str) for one in targets)):
            raise TypeError("target_modules is no list of names")
        for key in facts.keys() - {*_SAID, *_ASIDE}:
            if facts[key] != _DEFAULTS[key] if key in _DEFAULTS else facts[key] not in (None, False, [], {}):
                raise ValueError(f"no run sets {key}, by which adapters mean something else; merge them with peft")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"{place}: {FILE} can't be used ({one_line(error)})") from None
    return Adapters(content, base, rank, alpha / rank, tuple(targets), transposed)


def vouched(adapters: Adapters | None, source: Source) -> Adapters | None:
    """The adapters by the file of the run, if it is there, and the marker of their checkpoint; None if it holds none.

    The marker of an earlier version has the flags of the run alone. Raises Refused where they and the file differ, the
    tensors are of other adapters, or nothing describes them.
    """
    marker = marker_of(source)
    flags, kept = marker.get("config", {}), marker.get("adapters", {})
    if adapters is None and not kept:
        if any(map(is_adapter, source.tensors)):
            raise Refused(
                f"{source.place}: holds adapters, and no {FILE} of a run beside it describes them; put that back, or "
                "merge them with peft"
            )
        return None
    file = kept if adapters is None else json.loads(adapters.content)
    rank = flags.get("lora")
    by_flags = {"r": rank, "lora_alpha": flags.get("lora-alpha") or 2.0 * rank} if type(rank) is int else {}
    for key, value in [*kept.items(), *by_flags.items()]:
        if key not in _ASIDE and file.get(key, value) != value:
            raise Refused(
                f"{source.place}: {FILE} of its run says {key} {file[key]}, and {MARKER} of the checkpoint "
                f"{value}; put the file back that the run wrote"
            )
    found = read_adapters((json.dumps({**kept, **file}, indent=1) + "\n").encode(), source.place)
    _layers(source, found)
    return found


def marker_of(source: Source) -> Mapping[str, Any]:
    """The marker of a checkpoint; empty if the source has none."""
    return read_marker(source.folder) if source.folder is not None and is_there(source.folder, MARKER) else {}


def _layers(source: Source, adapters: Adapters) -> dict[str, tuple[str, str]]:
    """Layer -> the names of its A and B in a source. Raises Refused for tensors that are none, or of other adapters."""
    names = weights(source)
    layers = [name.removesuffix(_A) for name in names if name.endswith(_A)]
    found = {layer: (names[layer + _A], names.get(layer + _B, "")) for layer in layers}
    pairs = {original for pair in found.values() for original in pair}
    wrong = [f"{name} is no half of a pair" for name, original in names.items() if original not in pairs]
    for layer, (a, b) in found.items():
        shapes = [tuple(source.tensors[name].shape) if name else () for name in (a, b)]
        if others := {source.tensors[name].dtype for name in (a, b) if name} - _DTYPES:
            wrong.append(f"those of {layer} are {others.pop()}")
        if [len(shape) for shape in shapes] != [2, 2] or not shapes[0][0] == shapes[1][1] == adapters.rank:
            wrong.append(f"those of {layer} are {shapes[0]} and {shapes[1]}, and r is {adapters.rank}")
        if not any(f".{layer}".endswith(f".{target}") for target in adapters.targets):
            wrong.append(f"target_modules doesn't name {layer}")
    if wrong:
        raise Refused(f"{source.place}: its tensors aren't the adapters that {FILE} describes: {wrong[0]}")
    return found


def write_peft(
    folder: LocalFiles,
    adapters: Adapters,
    tensors: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    named: Mapping[str, str],
    beside: Mapping[str, bytes],
) -> None:
    """Fill an empty folder with what `PeftModel.from_pretrained(model, folder)` reads, and `AutoPeftModel…` alone.

    Args:
        named: what the description says of the model in the place of what the run wrote.
        beside: path -> content of further files.
    """
    names = {f"base_model.model.{name.replace('.default.', '.')}": name for name in tensors}
    theirs = {name: tensors[ours] for name, ours in names.items()}
    write_file(folder, "adapter_model.safetensors", theirs, lambda name: read(names[name]))
    description = (json.dumps({**json.loads(adapters.content), **named}, indent=1) + "\n").encode()
    for name, content in {**beside, FILE: description}.items():
        folder.mkdir(os.path.dirname(name))
        folder.write(name, content)
        folder.fsync(name)


def merged(source: Source, base: Source, adapters: Adapters, *, rounded: bool = True) -> Source:
    """All weights of the base, and in each that has adapters (out, in) + scale x B A.

    A is (rank, in) and B (out, rank). Source: https://arxiv.org/abs/2106.09685

    Args:
        rounded: to the base's dtype; else the sums are in fp64, for a caller that rounds them once, to its own dtype.

    Raises Refused if the adapters aren't of these weights.
    """
    theirs = weights(base)
    layers = {f"{layer}.weight": pair for layer, pair in _layers(source, adapters).items()}
    if absent := sorted(layers.keys() - theirs.keys()):
        raise Refused(
            f"{source.place}: {base.place} has no {absent[0]}, which the adapters go beside; use --format peft, and "
            "load both, unmerged, with PeftModel.from_pretrained"
        )

    def read(name: str) -> Tensor:
        weight: Tensor = base.read(theirs[name])
        if name not in layers:
            return weight
        a, b = (source.read(original).double() for original in layers[name])
        change = (b @ a).T if adapters.transposed else b @ a
        if change.shape != weight.shape:
            raise Refused(
                f"{source.place}: the adapters of {name} are for {tuple(change.shape)}, and {base.place} has "
                f"{tuple(weight.shape)}"
            )
        total = weight.double() + adapters.scale * change
        return total.to(weight.dtype) if rounded else total

    tensors = {name: base.tensors[original] for name, original in theirs.items()}
    return Source(source.place, tensors, [], {name: (name,) for name in tensors}, read)


def same_base(source: Source, base: Source, tied: Sequence[Sequence[str]]) -> str:
    """A note on the base for the line that says what was written; "" if it is that of the training.

    By a checksum of each weight that the model has, whole and so without a collective. Raises Refused if they differ.

    Args:
        tied: names of one weight, of which a file may hold one alone.
    """
    names = weights(base)
    for group in tied:
        names |= {name: names[known] for known in group if known in names for name in group if name not in names}
    model = [base_name(name) for name in marker_of(source).get("model", {}) if not is_adapter(name)]
    if _CHECKSUM not in source.values or not model or not names.keys() >= {*model}:
        return f", and {base.place} can't be compared with the weights of the training"
    if checksum(base.read(names[name]) for name in model) != source.read(_CHECKSUM):
        raise Refused(
            f"{source.place}: its adapters go beside the weights that {base.place} had at that time, and those there "
            "differ; use --format peft, and load them beside those"
        )
    return ""

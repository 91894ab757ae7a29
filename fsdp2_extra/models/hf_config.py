"""The config.json of a model of transformers: its class and its task, and what in it no run can train."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp2_extra.foreign.code import ForeignCode, installed_code_only

# What a model is for -> transformers' class that makes one, and its table from a configuration to a class. Encoders
# stand in the table of causal models too, as the decoders that they can be made into.
TASKS = {
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING"),
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
}
RETURNED = re.compile(r"use_cache|return_dict|output_\w+")  # settings of what a forward returns


@contextmanager
def transformers_can(what: str, folder: Path, *, trusted: bool, fix: str = "", trust: str = "") -> Iterator[None]:
    """Let transformers read a folder. Raises ValueError, in one line, for whatever it raises of a stranger's numbers;
    `trust` stands in it where that asks for the folder's own code."""
    try:
        with installed_code_only(folder, trusted=trusted):
            yield
    except Exception as error:
        asks = isinstance(error, ForeignCode) or "trust_remote_code" in str(error)
        raise ValueError(f"transformers can't {what} ({line(error)}){trust * asks}{fix}") from None


def line(error: BaseException) -> str:
    """An error's text, or else its name, in one line that isn't long."""
    text = repr(error) if isinstance(error, KeyError) else str(error)  # a KeyError's text is the key alone
    return shortened(text) or type(error).__name__


def shortened(text: str) -> str:
    """The start of a text, in one line."""
    text = " ".join(text.split())
    return text if len(text) <= 160 else f"{text[:160]}…"


def class_for(task: str, config: Any) -> Any:
    """transformers' class that does a task by such a configuration; None if there is none."""
    import transformers

    found = getattr(transformers, TASKS[task][1]).get(type(config), None)
    return found[0] if isinstance(found, (tuple, list)) else found


def task_of(config: Any, *, trusted: bool) -> tuple[str, Any]:
    """The task of a model and its class: as its configuration says, else the first task that there is a class for.

    A class of the folder's own is used if it is trusted; else the task that it is for has transformers' class.
    Raises ValueError if there is none.
    """
    classes = {task: found for task in TASKS if (found := class_for(task, config)) is not None}
    named = (getattr(config, "architectures", None) or [None])[0]
    for task, model_class in classes.items():
        if model_class.__name__ == named:
            return task, model_class
    remote = getattr(config, "auto_map", {})
    for task, (auto, _) in TASKS.items():
        if auto in remote and (trusted or task in classes):
            from transformers.dynamic_module_utils import get_class_from_dynamic_module as own_class

            return task, own_class(remote[auto], config.name_or_path) if trusted else classes[task]
    if not classes:
        raise ValueError(f"{type(config).__name__} is the configuration of no model for {', '.join(TASKS)}")
    return next(iter(classes.items()))


def require_trainable(config: Any, place: str, file: Path) -> None:
    """Raise ValueError, in one line, for a configuration whose model no run can train."""
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{place}: its weights are quantised: packed integers and scales have no rows to shard; give "
            "the model in bf16 or fp32"
        )
    settings = list(settings_of(config.to_dict()))
    drops = [(name, value) for name, value in settings if name.endswith("layerdrop") and isinstance(value, float | int)]
    if dropped := sorted(name for name, value in drops if value > 0):
        raise ValueError(
            f"{file}: {dropped[0]} is above 0: each rank would skip layers of its own, and wait for "
            "the others to gather them; set it to 0"
        )
    if own := getattr(config, "transformers_weights", None):
        raise ValueError(
            f"{file}: transformers_weights names {shortened(str(own))}, and only "
            "model.safetensors, pytorch_model.bin or an index of either is read; name that file so, and drop the key"
        )
    if (nan := next((name for name, value in settings if value != value), None)) is not None:
        raise ValueError(f"{file}: {nan} is NaN, and so would be all of the model; give a number")
    paths = (value for _, value in settings if isinstance(value, str) and "/" in value)
    if outside := next((path for path in paths if os.path.isfile(os.path.expanduser(path))), None):
        # timm and others open such files, whatever these hold.
        raise ValueError(f"{file}: names a file, {outside}, of which a model would be made; drop it there")


def settings_of(settings: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The name and the value of each setting of a configuration's table, those within others and in lists too."""
    if isinstance(settings, Mapping | list | tuple):
        for key, value in settings.items() if isinstance(settings, Mapping) else ((name, one) for one in settings):
            yield from settings_of(value, str(key))
    else:
        yield name, settings


def settle(config: Any) -> None:
    """Let a forward return logits alone, by their name, and keep no plan of the file's own for splitting layers.

    Keys and values are for generating: in training recomputation would add to them.
    """
    config.use_cache = False
    for name in ("output_attentions", *vars(config)):
        if RETURNED.fullmatch(name) and isinstance(getattr(config, name, None), bool):
            setattr(config, name, name == "return_dict")
    for plan in [name for name in vars(config) if re.fullmatch(r"base_model_\w+_plan", name)]:
        delattr(config, plan)
    for part in getattr(config, "sub_configs", None) or {}:
        if getattr(config, part, None) is not None:
            settle(getattr(config, part))

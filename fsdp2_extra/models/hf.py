"""`--model hf:DIR_OR_NAME`: a model of Hugging Face's transformers, by its folder or its name on the hub.

The folder's config.json says which class it is. Nothing here is particular to one architecture.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2.models.names import WEIGHTS, on_hub
from fsdp2.models.spec import Batch, ModelSpec
from fsdp2.units import install
from fsdp2_extra.foreign.bounds import Foreign, run_in_bounds
from fsdp2_extra.foreign.code import ForeignCode, installed_code_only
from fsdp2_extra.foreign.model_files import files_to_keep
from fsdp2_extra.models.attending import attentions, by_flex
from fsdp2_extra.models.blocks import find_blocks
from fsdp2_extra.models.causal import sees_later
from fsdp2_extra.models.meta_trial import wrong_with

KEPT = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "special_tokens_map.json"),
    *("tokenizer*", "vocab*", "merges.txt", "*.model", "chat_template*", "added_tokens.json", "*.py"),
)
# What a model is for -> transformers' class that makes one, and its table from a configuration to a class. Encoders
# stand in the table of causal models too, as the decoders that they can be made into.
TASKS = {
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING"),
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
}
RETURNED = re.compile(r"use_cache|return_dict|output_\w+")  # settings of what a forward returns
MEMORY = 16 << 30  # for its description, and for two blocks of a model of which it isn't known what they see
# What transformers calls the tensors of a file that aren't the model's.
DIFFERENCES = {
    "missing_keys": "only in the model",
    "unexpected_keys": "only in the file",
    "mismatched_keys": "another shape in the file",
}


def spec(place: str, *, trust_remote_code: bool = False) -> ModelSpec:
    """The specification of the model in a folder, or under a name on the hub.

    Args:
        trust_remote_code: run the Python files that come with a model whose architecture transformers doesn't know.

    Raises ValueError, in one line, if there is no such model or transformers can't make it.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError(f"transformers isn't installed; {install('hf')}") from None
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # a line for each enum of torchao's
    folder = _folder(place)

    def described() -> tuple[ModelSpec, str]:
        return _described(transformers, place, folder, trust_remote_code=trust_remote_code)

    def looked_at() -> bool | None:
        made, in_doubt = described()
        model = made.on_meta("own")
        with installed_code_only(folder, trusted=trust_remote_code):
            if wrong := wrong_with(model, made.task, made.call):
                raise ValueError(f"{file}: a forward of the model fails ({wrong}); lower or mend its numbers")
            return sees_later(made.on_meta("own"), made.call, made.logits) if in_doubt else False

    def alone() -> bool | None:
        torch.set_num_threads(1)  # a fork has none of its parent's
        return looked_at()

    file = folder / "config.json"
    bounds = Foreign(str(file), ValueError, "give another model, or lower its numbers", file.stat().st_size, MEMORY)
    # First: what goes beyond its bounds never begins in this process.
    seen = looked_at() if trust_remote_code else run_in_bounds(alone, bounds)
    made, in_doubt = described()
    if seen:
        raise ValueError(
            f"{file}: {in_doubt} sees the tokens that it is to predict unless is_decoder is true; set it there, or "
            "name the class for masked tokens in architectures"
        )
    return made


def _described(transformers: Any, place: str, folder: Path, *, trust_remote_code: bool) -> tuple[ModelSpec, str]:
    """`spec`, and the name of a causal model's class which may see later tokens all the same; else no name."""
    file = folder / "config.json"

    def guarded() -> AbstractContextManager[None]:
        return installed_code_only(folder, trusted=trust_remote_code)

    try:
        with guarded():
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            task, model_class = _task(transformers, config, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a library raises for a stranger's numbers
        asks = isinstance(error, ForeignCode) or "trust_remote_code" in str(error)
        hint = "; --trust-remote-code runs the model's own Python files" if asks else ""
        raise ValueError(f"transformers can't use {file} ({_line(error)}){hint}") from None
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{place}: its weights are quantised: packed integers and scales have no rows to shard; give "
            "the model in bf16 or fp32"
        )
    settings = list(_settings(config.to_dict()))
    if dropped := sorted(name for name, value in settings if _drops_layers(name, value)):
        raise ValueError(
            f"{file}: {dropped[0]} is above 0: each rank would skip layers of its own, and wait for "
            "the others to gather them; set it to 0"
        )
    if own := getattr(config, "transformers_weights", None):
        raise ValueError(
            f"{file}: transformers_weights names {_line(ValueError(own))}, and only "
            "model.safetensors, pytorch_model.bin or an index of either is read; name that file so, and drop the key"
        )
    if (nan := next((name for name, value in settings if value != value), None)) is not None:
        raise ValueError(f"{file}: {nan} is NaN, and so would be all of the model; give a number")
    if outside := next((value for _, value in settings if _is_file(value)), None):
        raise ValueError(f"{file}: names a file, {outside}, of which a model would be made; drop it there")
    _settled(config)
    try:
        with guarded():
            special = _special_token(transformers, task, config, folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ValueError(f"transformers can't use the tokenizer in {folder} ({_line(error)})") from None
    accepted = set(inspect.signature(model_class.forward).parameters)

    def make(vocab_size: int | None = None, attention: str = "auto") -> nn.Module:
        # In fp32, whatever dtype the file has: these are the weights that the optimizer updates.
        auto = _forgetful(getattr(transformers, TASKS[task][0]))
        try:
            with guarded():
                model = auto.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
                return by_flex(model) if attention == "flex" else model
        except Exception as error:  # it looks at few of the numbers before
            raise ValueError(f"transformers can't make the model of {file} ({_line(error)})") from error

    def call(model: nn.Module, batch: Batch) -> Any:
        if task == "image":
            return model(pixel_values=resized(batch.inputs, model, config))
        inputs = batch.inputs if isinstance(batch.inputs, dict) else {"input_ids": batch.inputs}
        return model(**{name: tensor for name, tensor in inputs.items() if name in accepted})

    def load(
        place: Path, *, partial: bool = False, read: bool = True, packed: Sequence[str] = ()
    ) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
        _folder(str(place))  # refuses one with adapters
        # As from_pretrained says it, files that lack something or have more are a warning; here they are an error.
        auto, words = _forgetful(getattr(transformers, TASKS[task][0])), transformers.utils.logging
        settings = {"trust_remote_code": trust_remote_code, "config": config, "use_safetensors": True}
        settings |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        if not read:
            if importlib.util.find_spec("accelerate") is None:
                raise ValueError(f"accelerate isn't installed; {install('hf')}")
            settings["device_map"] = "meta"
        verbosity, bars = words.get_verbosity(), words.is_progress_bar_enabled()
        words.disable_progress_bar()
        words.set_verbosity_error()  # its report of them is a table, and the lines below say what it says
        try:
            with installed_code_only(place, trusted=trust_remote_code):
                model, info = auto.from_pretrained(place, dtype=torch.float32, **settings)
        except Exception as error:
            raise ValueError(f"transformers can't load {place} ({_line(error)}); give another") from None
        finally:
            words.set_verbosity(verbosity)
            if bars:
                words.enable_progress_bar()
        wrong = {
            str(one[0] if isinstance(one, tuple) else one): DIFFERENCES.get(kind, kind)  # a name, or it and two shapes
            for kind, found in info.items()
            for one in sorted(found)
        }
        state: Mapping[str, Tensor] = model.state_dict()
        if quantized := _weights_of(model, packed) - wrong.keys():
            raise ValueError(f"{place}: {min(quantized)} is of integers or 8 bits and needs scales; give 16 or more")
        if wrong and not (partial and state.keys() - wrong.keys()):
            lines = "; ".join(f"{name}: {kind}" for name, kind in [*wrong.items()][:20])
            raise ValueError(f"{place} is of another model; {len(wrong)} tensors differ: {lines}; use --init-partial")
        return state, wrong

    @cache
    def splits() -> Any:
        from fsdp2_extra.models.hf_splits import plan_of

        return plan_of(made.described("own"), lambda model: wrong_with(model, task, call))

    def split_sizes(*_: Any) -> Mapping[str, int]:
        from fsdp2_extra.models.hf_splits import sizes_of

        return sizes_of(made.described("own"))

    language = task != "image"
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    made = ModelSpec(
        name=f"hf:{place}",
        kind="language" if language else "image",
        sizes={"own": {"vocab_size": config.get_text_config().vocab_size} if language else {}},
        make=make,
        blocks=find_blocks,
        initial_values={},
        loss=loss,
        call=call,
        logits=lambda outputs: outputs.logits,
        classes=config.num_labels,
        task=task,
        special_token=special,
        positions=positions if isinstance(positions, int) and positions > 0 else None,
        weights=folder,
        load=load,
        head=lambda model: model.get_output_embeddings() if language else None,
        files=lambda size: {path.name: path.read_bytes() for path in files_to_keep(folder, KEPT)},
        splits=splits,
        split_sizes=split_sizes,
        methods=("generate",) if _generates(model_class) else (),
        attentions=attentions(config, model_class, settings, task),
    )
    encoder = getattr(transformers, TASKS["masked"][1]).get(type(config), None)
    # An attribute that says no decides nothing: it does of GPT-NeoX. A first step finds out of the other models.
    in_doubt = task == "causal" and not getattr(config, "is_decoder", encoder is None)
    return made, model_class.__name__ if in_doubt else ""


def _weights_of(model: nn.Module, packed: Sequence[str]) -> set[str]:
    """Names of a folder's tensors without those of tables and counters, and those that the class never reads."""
    own = {name.rpartition(".")[2] for name, one in model.named_buffers() if not one.is_floating_point()}
    ignored = re.compile("|".join(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ["$^"]))
    return {name for name in packed if name.rpartition(".")[2] not in own and not ignored.search(name)}


def _forgetful(auto: Any) -> Any:
    """A class of transformers that makes models by their configuration, and keeps no class of a folder's own: it would
    make later folders' models of it too, whose code nobody trusts."""
    return type(auto.__name__, (auto,), {"register": classmethod(lambda *_, **__: None)})


def loss(outputs: Any, targets: Tensor) -> Tensor:
    """The sum of the cross-entropies, 0-d fp32, of (…, classes) logits and (…) targets.

    Of the logits alone. What a class adds to its own loss, such as a router's balance, is not in it."""
    logits = outputs.logits.float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def resized(images: Tensor, model: nn.Module, config: Any) -> Tensor:
    """Images (N, channels, height, width) with as many channels, and as large, as a vision model takes them.

    Channels are those of its first convolution. The size is in its configuration, or that of its part for images; of a
    model of timm's within, in what that says of itself.
    """
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    channels = images.shape[1] if first is None else first.in_channels
    size = getattr(getattr(config, "vision_config", config), "image_size", None)
    if size is None:
        of_timm: Any = next((one.pretrained_cfg for one in model.modules() if "pretrained_cfg" in vars(one)), None)
        size = of_timm["input_size"][1:] if of_timm else None
    if images.shape[1] == 1 != channels:
        images = images.expand(-1, channels, -1, -1)
    wanted = tuple(images.shape[2:]) if size is None else (size, size) if isinstance(size, int) else tuple(size)
    return images if tuple(images.shape[2:]) == wanted else F.interpolate(images, wanted, mode="bilinear")


def _settings(settings: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The name and the value of each setting of a configuration, those within others and in lists too."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from _settings(value, str(key))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _settings(value, name)
    else:
        yield name, settings


def _drops_layers(name: str, value: Any) -> bool:
    return name.endswith("layerdrop") and isinstance(value, float | int) and value > 0


def _is_file(value: Any) -> bool:
    """True for the path of a file of this machine: timm and others open such, whatever they hold."""
    return isinstance(value, str) and "/" in value and os.path.isfile(os.path.expanduser(value))


def _settled(config: Any) -> None:
    """Let a forward return logits alone, by their name. Keys and values are for generating: in training recomputation
    would add to them. Nor keep a plan of the file's own for splitting layers, in the place of its class's.

    A model of several parts has a configuration for each.
    """
    config.use_cache = False
    for name in ("output_attentions", *vars(config)):
        if RETURNED.fullmatch(name) and isinstance(getattr(config, name, None), bool):
            setattr(config, name, name == "return_dict")
    for plan in [name for name in vars(config) if re.fullmatch(r"base_model_\w+_plan", name)]:
        delattr(config, plan)
    for name in getattr(config, "sub_configs", None) or {}:
        if getattr(config, name, None) is not None:
            _settled(getattr(config, name))


def _task(transformers: Any, config: Any, *, trust_remote_code: bool) -> tuple[str, Any]:
    """The task of a model and its class: as its configuration says, else the first task that there is a class for.

    A class of the folder's own is used if it is trusted; else the task that it is for has transformers' class.
    Raises ValueError if there is none.
    """
    classes = {}
    for task, (_, name) in TASKS.items():
        found = getattr(transformers, name).get(type(config), None)
        if found is not None:
            classes[task] = found[0] if isinstance(found, (tuple, list)) else found
    named = (getattr(config, "architectures", None) or [None])[0]
    for task, model_class in classes.items():
        if model_class.__name__ == named:
            return task, model_class
    remote = getattr(config, "auto_map", {})
    for task, (auto, _) in TASKS.items():
        if auto in remote and task in classes and not trust_remote_code:
            return task, classes[task]
        if auto in remote and trust_remote_code:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            return task, get_class_from_dynamic_module(remote[auto], config.name_or_path)
    if not classes:
        raise ValueError(f"{type(config).__name__} is the configuration of no model for {', '.join(TASKS)}")
    return next(iter(classes.items()))


def _generates(model_class: Any) -> bool:
    return hasattr(model_class, "can_generate") and bool(model_class.can_generate())


def _special_token(transformers: Any, task: str, config: Any, folder: Path, *, trust_remote_code: bool) -> int | None:
    """The token that hides others, or that a decoder begins with; None for what needs none.

    A model without a tokenizer is trained on bytes or numbers: the last of its vocabulary hides others.
    """
    if task == "seq2seq":
        known = (getattr(config, f"{name}_token_id", None) for name in ("decoder_start", "bos", "pad"))
        return next((int(token) for token in known if token is not None), 0)
    if task != "masked":
        return None
    if any(folder.glob("tokenizer*")):
        # Said in any case: unset, transformers asks on the terminal.
        opened = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        mask = opened.mask_token_id
        if mask is not None:
            return int(mask)
    return int(config.get_text_config().vocab_size) - 1


def _folder(place: str) -> Path:
    """The folder of a model; one that is named is looked for in the hub's cache, and downloaded."""
    path = Path(place).expanduser()
    if path.is_dir():
        if adapters := sorted(path.glob("adapter_model.*")):
            other = ", or move them away to train the model without them" * (path / "config.json").is_file()
            raise ValueError(f"{adapters[0]}: adapters aren't loaded; merge them into their model with peft{other}")
        if not (path / "config.json").is_file():
            raise ValueError(f"{place}: has no config.json; give the folder that save_pretrained wrote")
        files_to_keep(path, KEPT)
        return path.absolute()
    if not on_hub(place):
        raise ValueError(
            f"{place}: is no folder; give one with a config.json, or a name on the hub such as owner/model"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        # Ranks that ask at the same time wait for each other at the hub's own locks.
        return Path(snapshot_download(place, allow_patterns=[*KEPT, *WEIGHTS, "*.index.json"]))
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise ValueError(f"{place}: no folder here and no model on the hub has this name ({_line(error)})") from None
    except (LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{place}: is not in the hub's cache, and can't be downloaded ({_line(error)}); download it where there is "
            "a network and give its folder"
        ) from None


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    text = repr(error) if isinstance(error, KeyError) else text  # its text is the key alone
    return text if len(text) <= 160 else f"{text[:160]}…"

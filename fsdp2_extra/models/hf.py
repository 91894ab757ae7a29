"""`--model hf:DIR_OR_NAME`: a model of Hugging Face's transformers. Nothing here is particular to one architecture."""

from __future__ import annotations

import inspect
import logging
import warnings
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2.models.spec import Batch, ModelSpec
from fsdp2.units import install
from fsdp2_extra.foreign.bounds import Foreign, run_in_bounds
from fsdp2_extra.foreign.code import installed_code_only
from fsdp2_extra.foreign.model_files import files_to_keep
from fsdp2_extra.models.attending import attentions, by_flex, not_on_padding
from fsdp2_extra.models.blocks import find_blocks
from fsdp2_extra.models.causal import sees_later
from fsdp2_extra.models.hf_config import TASKS, class_for, require_trainable, settle, task_of, transformers_can
from fsdp2_extra.models.hf_load import KEPT_FILES, folder_of, load
from fsdp2_extra.models.hf_splits import plan_of, sizes_of
from fsdp2_extra.models.meta_trial import wrong_with

MEMORY = 16 << 30  # to make the model on meta, and to run two of its blocks where it isn't known what they see


def spec(place: str, *, trust_remote_code: bool = False) -> ModelSpec:
    """The specification of the model in a folder, or under a name on the hub.

    Args:
        trust_remote_code: run the Python files that come with a model whose architecture transformers doesn't know.

    Raises ValueError, in one line, if there is no such model or transformers can't make it.
    """
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ValueError(f"transformers isn't installed; {install('hf')}") from None
    # Kept off each rank's console: a line for each enum of torchao's, advice about padding, and a warning of views.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    logging.getLogger("transformers.modeling_utils").addFilter(not_on_padding)
    warnings.filterwarnings("ignore", ".* returned a view tensor", UserWarning)  # with --tp, of logits nobody changes
    folder = folder_of(place)
    file = folder / "config.json"
    bounds = Foreign(str(file), ValueError, "give another model, or lower its numbers", file.stat().st_size, MEMORY)

    def try_in_bounds() -> None:
        if not trust_remote_code:
            torch.set_num_threads(1)  # a fork has none of its parent's
        model = _Model(place, folder, trusted=trust_remote_code)
        made = model.spec.on_meta("own")
        with installed_code_only(folder, trusted=trust_remote_code):
            if wrong := model.fails(made):
                raise ValueError(f"{file}: a forward of the model fails ({wrong}); lower or mend its numbers")
            if model.may_see_later and sees_later(model.spec.on_meta("own"), model.call, model.spec.logits):
                raise ValueError(
                    f"{file}: {model.cls.__name__} sees the tokens that it is to predict unless is_decoder is true; "
                    "set it there, or name the class for masked tokens in architectures"
                )

    # In a fork first, so that what goes beyond its bounds never begins in this process, which makes the model again.
    try_in_bounds() if trust_remote_code else run_in_bounds(try_in_bounds, bounds)
    return _Model(place, folder, trusted=trust_remote_code).spec


class _Model:
    """A folder's model: its `config`, its class `cls`, what it is for, and all that a `ModelSpec` asks of it."""

    def __init__(self, place: str, folder: Path, *, trusted: bool) -> None:
        import transformers

        self.place, self.folder, self.trusted, self.file = place, folder, trusted, folder / "config.json"
        hint = "; --trust-remote-code runs the model's own Python files"
        with transformers_can(f"use {self.file}", folder, trusted=trusted, trust=hint):
            self.config = config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
            self.task, self.cls = task_of(config, trusted=trusted)
        require_trainable(config, place, self.file)
        settle(config)
        with transformers_can(f"use the tokenizer in {folder}", folder, trusted=trusted):
            self.special_token = self._special_token(transformers)
        self.accepted = set(inspect.signature(self.cls.forward).parameters)
        self.fails = partial(wrong_with, task=self.task, call=self.call)
        # `is_decoder: false` proves nothing: GPT-NeoX has it and is causal. The first step tests such models.
        is_decoder = getattr(config, "is_decoder", class_for("masked", config) is None)
        self.may_see_later = self.task == "causal" and not is_decoder
        # Makes models by their configuration, and keeps no class of a folder's own: it would make later folders' models
        # of it too, whose code nobody trusts.
        auto = getattr(transformers, TASKS[self.task][0])
        self.auto: Any = type(auto.__name__, (auto,), {"register": classmethod(lambda *_, **__: None)})

    @cached_property
    def spec(self) -> ModelSpec:
        language, words = self.task != "image", self.config.get_text_config()
        positions = getattr(words, "max_position_embeddings", None)
        generates = hasattr(self.cls, "can_generate") and bool(self.cls.can_generate())
        return ModelSpec(
            name=f"hf:{self.place}",
            kind="language" if language else "image",
            sizes={"own": {"vocab_size": words.vocab_size} if language else {}},
            make=self.make,
            blocks=find_blocks,
            initial_values={},
            loss=loss,
            call=self.call,
            logits=lambda outputs: outputs.logits,
            classes=self.config.num_labels,
            task=self.task,
            special_token=self.special_token,
            positions=positions if isinstance(positions, int) and positions > 0 else None,
            weights=self.folder,
            load=partial(load, self.auto, self.config, self.trusted),
            head=lambda model: model.get_output_embeddings() if language else None,
            files=lambda size: {path.name: path.read_bytes() for path in files_to_keep(self.folder, KEPT_FILES)},
            splits=cache(lambda: plan_of(self.spec.described("own"), self.fails)),
            split_sizes=lambda *_: sizes_of(self.spec.described("own")),
            methods=("generate",) if generates else (),
            attentions=attentions(self.config, self.cls, self.task),
        )

    def make(self, vocab_size: int | None = None, attention: str = "auto") -> nn.Module:
        # In fp32, whatever dtype the file has: these are the weights that the optimizer updates.
        with transformers_can(f"make the model of {self.file}", self.folder, trusted=self.trusted):
            model = self.auto.from_config(self.config, dtype=torch.float32, trust_remote_code=self.trusted)
            return by_flex(model) if attention == "flex" else model

    def call(self, model: nn.Module, batch: Batch) -> Any:
        if self.task == "image":
            return model(pixel_values=resized(batch.inputs, model, self.config))
        inputs = batch.inputs if isinstance(batch.inputs, dict) else {"input_ids": batch.inputs}
        return model(**{name: tensor for name, tensor in inputs.items() if name in self.accepted})

    def _special_token(self, transformers: Any) -> int | None:
        """The token that hides others, or that a decoder begins with; None for what needs none."""
        if self.task == "seq2seq":
            known = (getattr(self.config, f"{name}_token_id", None) for name in ("decoder_start", "bos", "pad"))
            return next((int(token) for token in known if token is not None), 0)
        if self.task != "masked":
            return None
        if any(self.folder.glob("tokenizer*")):
            # Said in any case: unset, transformers asks on the terminal.
            opened = transformers.AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.trusted)
            if opened.mask_token_id is not None:
                return int(opened.mask_token_id)
        return int(self.config.get_text_config().vocab_size) - 1  # without a tokenizer it learns bytes or numbers


def loss(outputs: Any, targets: Tensor) -> Tensor:
    """The sum of the cross-entropies, 0-d fp32, of (…, classes) logits and (…) targets.

    Of the logits alone. What a class adds to its own loss, such as a router's balance, is not in it."""
    logits = outputs.logits.float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def resized(images: Tensor, model: nn.Module, config: Any) -> Tensor:
    """Images (N, channels, height, width) as large as a vision model takes them, with its first layer's channels."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    channels = images.shape[1] if first is None else first.in_channels
    if images.shape[1] == 1 != channels:
        images = images.expand(-1, channels, -1, -1)
    size = _image_size(model, config)
    is_right = size is None or tuple(images.shape[2:]) == size
    return images if is_right else F.interpolate(images, size, mode="bilinear")


def _image_size(model: nn.Module, config: Any) -> tuple[int, ...] | None:
    """Height and width, by the configuration or that of its part for images, or by a model of timm's within."""
    size = getattr(getattr(config, "vision_config", config), "image_size", None)
    if size is not None:
        return (size, size) if isinstance(size, int) else tuple(size)
    for module in model.modules():
        if timm_settings := vars(module).get("pretrained_cfg"):
            return tuple(timm_settings["input_size"][1:])
    return None

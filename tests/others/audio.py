"""Audio models of transformers, for `--model tests.others.audio:ARCHITECTURE`: behind a function of one's own.

Audio isn't read here, so a ModelSpec makes what a model hears of what is: a picture of 28 rows is a spectrogram of 28
bands, and its pixels one after the other are a wave.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fsdp2.models.spec import ModelSpec
from fsdp2_extra.models.blocks import find_blocks
from fsdp2_extra.models.hf import loss
from tests.others.tiny import tiny

SAMPLES, TIME = 3200, 64  # of a wave and of a spectrogram


def __getattr__(name: str) -> Callable[[], ModelSpec]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES as KNOWN

    for architecture in KNOWN:
        if architecture.replace("-", "_") == name:
            return partial(spec, architecture)
    raise AttributeError(name)


def spec(architecture: str) -> ModelSpec:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = tiny(CONFIG_MAPPING[architecture])
    config.num_labels = 10
    auto = transformers.AutoModelForAudioClassification
    return ModelSpec(
        architecture,
        "image",
        {"own": {}},
        partial(auto.from_config, config),
        find_blocks,
        {},
        loss,
        call=lambda model, batch: model(heard(batch.inputs, config)),
        logits=lambda outputs: outputs.logits,
    )


def heard(pictures: Tensor, config: Any) -> Tensor:
    """(N, 1, 28, 28) as the first input of a model's forward."""
    whole = pictures[:, 0]
    if config.model_type == "whisper":  # bands first, and a first layer that halves the time
        size = (config.num_mel_bins, 2 * config.max_source_positions)
    elif hasattr(config, "feature_projection_input_dim"):
        size = (TIME, config.feature_projection_input_dim)
    elif hasattr(config, "num_mel_bins"):
        size = (config.max_length, config.num_mel_bins)
    else:
        return F.interpolate(whole.flatten(1)[:, None], SAMPLES, mode="linear")[:, 0]
    return F.interpolate(pictures, size, mode="bilinear")[:, 0]

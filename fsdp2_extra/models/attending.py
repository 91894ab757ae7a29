"""Attention of a model of transformers: by a kernel of torch's function, or by FlexAttention, if its class can.

Where documents of a row don't see each other, transformers finds them in `position_ids`, and makes a mask with a place
for each pair of tokens; for FlexAttention it makes one that knows of empty and full blocks of pairs.
Source: https://huggingface.co/docs/transformers/attention_interface
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fsdp2.models.attention import KERNELS, way
from fsdp2_extra.models.hf_config import settings_of


def attentions(config: Any, model_class: Any, task: str) -> Sequence[str]:
    """Those of `names.ATTENTIONS` that a model can follow: `auto` alone if its configuration says how it attends.

    Args:
        config: one that drops scores has no FlexAttention, as that of transformers drops none in training.
        task: FlexAttention is for causal models: only those are tried with several documents in a row.
    """
    if getattr(config, "_attn_implementation", None) not in (None, "sdpa"):
        return ("auto",)
    drops = any("drop" in name and "att" in name and value for name, value in settings_of(config.to_dict()))
    flex = task == "causal" and bool(getattr(model_class, "_supports_flex_attn", False)) and not drops
    torchs = KERNELS if getattr(model_class, "_supports_sdpa", False) else ()
    return ("auto", *torchs, *(["flex"] if flex else []))


def not_on_padding(record: logging.LogRecord) -> bool:
    """A filter for what transformers logs: no row begins with padding, on which GPT-2 gives advice, on each rank."""
    return "`attention_mask`" not in str(record.msg)


def by_flex(model: Any) -> nn.Module:
    """Let a model attend by FlexAttention where that can train, as `attention.way` says, and elsewhere as before.

    It is chosen before each forward: a run's model on a GPU may be asked on a CPU.
    """
    elsewhere = model.config._attn_implementation

    def choose(module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        device = next(one.device for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        chosen = "flex_attention" if way("flex", device.type, apart=True) == "flex" else elsewhere
        if module.config._attn_implementation != chosen:
            # As `set_attn_implementation` does it, which reads the file of a model's class: sharded, it has another.
            module.config._attn_implementation = chosen

    made: nn.Module = model
    made.register_forward_pre_hook(choose, with_kwargs=True)
    return made

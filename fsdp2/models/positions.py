"""Sequences longer than a model's table of positions, found before the model has any memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsdp2.models.spec import ModelSpec

SHORT = 8  # tokens that every model takes
BESIDE = 8  # rows that a table of positions may have more than there are positions


class _Enough(Exception):
    """All that comes before the blocks has passed."""


class _Lookups(TorchFunctionMode):
    """Looks nothing up, but whether each index is one of its table: that has no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.arange:  # of positions, on the device of a parameter
            return func(*args, **{**(kwargs or {}), "device": "cpu"})
        if func is not F.embedding or args[0].is_meta:
            return func(*args, **(kwargs or {}))
        indices, table = args[:2]
        if indices.numel() and (largest := int(indices.max())) >= len(table):
            raise IndexError(f"it looks up number {largest} in a table of {len(table)} rows")
        return torch.zeros(*indices.shape, table.shape[1])


def too_long(spec: ModelSpec, model: nn.Module, blocks: Sequence[nn.Module], seq_len: int) -> str | None:
    """The reason why a language model can't take sequences of this length, or None.

    A forward is tried up to the first block. What ends that of a short sequence too, such as a parameter that has no
    memory, is no reason. A table that is looked up later isn't found: the first step fails on that.

    Args:
        model: its parameters on `meta`; it is left in evaluation mode.
    """
    rows = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if all(count >= seq_len + BESIDE for count in rows):
        return None  # no table is that small, so there is none of positions

    def stop(*_: Any) -> None:
        raise _Enough

    hooks = [block.register_forward_pre_hook(stop) for block in blocks]
    short, long = (_end(spec, model.eval(), length) for length in (SHORT, seq_len))
    for hook in hooks:
        hook.remove()
    return None if re.sub(r"\d+", "", short) == re.sub(r"\d+", "", long) else long


@torch.no_grad()
def _end(spec: ModelSpec, model: nn.Module, seq_len: int) -> str:
    """The error that ends a forward, in one line; "" if none does."""
    tokens = torch.full((1, seq_len), 3)
    inputs: Tensor | dict[str, Tensor] = tokens
    if spec.task == "seq2seq":  # the halves of a sequence
        inputs = {"input_ids": tokens[:, : seq_len // 2], "decoder_input_ids": tokens[:, seq_len // 2 :]}
    try:
        with _Lookups():
            spec.call(model, SimpleNamespace(inputs=inputs, targets=tokens))
    except Exception as error:  # whatever a stranger's code raises
        return " ".join(str(error).split()) or type(error).__name__
    return ""

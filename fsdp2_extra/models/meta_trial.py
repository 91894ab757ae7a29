"""One forward of a stranger's model on `meta`, where tensors have shapes and no memory; it tells what a step takes.

A few bytes of a configuration can ask for a picture of a million pixels a side, for ten million passes through one
layer, or for a width that doesn't divide. Parameters, which are counted before, need be no more for that.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp2.models.attention import MeetsConditions

SAMPLES, TOKENS = 2, 16  # a batch norm needs more than one
LARGEST = 16 << 30  # bytes of a tensor that is made of so few samples


class TooLarge(ValueError):
    """A forward makes a tensor that no step could hold."""


class _Bounded(MeetsConditions):
    """While entered, raises TooLarge at a tensor of more than `LARGEST` bytes. Views count as what they are views of.

    `knows` is False once a model has asked for a value that isn't a condition, and goes on with 0.
    """

    knows = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype != torch.bool:
            self.knows = False
            return 0
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (size := tensor.untyped_storage().nbytes()) > LARGEST:
                given = {id(one.untyped_storage()) for one in tree_leaves(args) if isinstance(one, Tensor)}
                if id(tensor.untyped_storage()) not in given:  # a parameter of that size has been counted
                    raise TooLarge(f"makes a tensor of {size / (1 << 30):,.0f} GiB")
        return result


def wrong_with(model: nn.Module, task: str, call: Callable[[nn.Module, Any], Any]) -> str | None:
    """Return why a forward of two small samples fails, in words; None if it ends, or if `meta` can't tell.

    Args:
        model: its parameters on `meta`. It is used up, and is in training mode.
        task: what the samples are: `image` has pictures (2, 1, 28, 28), others tokens (2, 16).
        call: (model, batch) -> outputs.
    """
    batch = SimpleNamespace(inputs=_samples(task), targets=torch.zeros(SAMPLES, dtype=torch.int64, device="meta"))
    try:
        wrong = _raised(model, batch, call)
        # Numbers that don't fit fail in each dtype. torch 2.11 multiplies experts on `meta` in bf16 alone.
        return wrong and _raised(model.to(torch.bfloat16), batch, call)
    except TooLarge as error:  # for good: in another dtype it may be within the bound
        return str(error)


def _raised(model: nn.Module, batch: Any, call: Callable[[nn.Module, Any], Any]) -> str | None:
    bounded = _Bounded()
    try:
        with torch.no_grad(), torch.device("meta"), bounded:
            call(model.to("meta").train(), batch)
    except TooLarge:
        raise
    except Exception as error:  # whatever a stranger's numbers raise
        text = " ".join(str(error).split())
        # What `meta` lacks says nothing of the model: values, some operations, tensors that were made elsewhere.
        lacks = not bounded.knows or isinstance(error, NotImplementedError) or "meta" in text
        return None if lacks else f"{type(error).__name__}: {text[:160]}"
    return None


def _samples(task: str) -> Any:
    if task == "image":
        return torch.zeros(SAMPLES, 1, 28, 28, device="meta")
    tokens = torch.zeros(SAMPLES, TOKENS, dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "decoder_input_ids": tokens} if task == "seq2seq" else tokens

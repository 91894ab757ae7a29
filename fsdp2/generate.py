"""Text that a causal language model goes on with; the same on any number of ranks, sharded or not.

Each new token takes a whole forward over what stands there: there is no cache of keys and values, so this is to look
at what a model has learned, and not to serve it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.data.loader import Batch
from fsdp2.models.spec import ModelSpec


@torch.no_grad()
def generate(
    forward: Callable[[Batch], Any],
    spec: ModelSpec,
    tokens: Tensor,
    *,
    new_tokens: int,
    window: int,
    temperature: float = 0.0,
    seed: int = 1,
    ends: Collection[int | None] = (),
) -> Iterator[int]:
    """The tokens that follow, one after the other. A collective call where the model is sharded.

    Args:
        forward: of a batch whose inputs are (1, T) tokens.
        tokens: (T,) int64 to begin with, one or more, on the model's device.
        window: how many of the last tokens the model sees.
        temperature: 0 takes the likeliest token; else they are drawn by softmax(logits / temperature), from a generator
            that `seed` starts.
        ends: the tokens of which each ends a text.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(new_tokens):
        seen = tokens[-window:].unsqueeze(0)
        logits = spec.logits(forward(Batch(seen, seen, True, 1, seen.numel(), True)))[0, -1].double().cpu()
        drawn = logits.argmax().reshape(1)
        if temperature:
            drawn = torch.multinomial(torch.softmax((logits - logits.max()) / temperature, 0), 1, generator=generator)
        if dist.is_initialized() and dist.get_world_size() > 1:
            drawn = drawn.to(tokens.device)
            dist.broadcast(drawn, src=0)  # ranks of other hardware may round to another one
        token = int(drawn)
        if token in ends:
            return
        tokens = torch.cat([tokens, drawn.to(tokens)])
        yield token

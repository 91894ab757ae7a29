"""Sequence parallelism: ranks have a piece of each sequence, and in attention some heads of all of it.

    tokens of a piece, all heads   --all-to-all-->   all tokens, some heads   attention   --all-to-all-->   as before

Only attention lets tokens meet, so all else computes on pieces, and FSDP2 takes these ranks for any others that shard:
each computes the loss of its own tokens, and their gradients are summed as those of other samples are.

Source: https://arxiv.org/abs/2309.14509 (DeepSpeed Ulysses)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""Queries, keys, values (N, heads, tokens, width), and a mask of all tokens -> (N, heads, tokens, width)."""


def split_sequences(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let each module that has an `attend` exchange heads for tokens around it. No collective.

    Args:
        group: the ranks that have the pieces of the same sequences, in their order.

    Raises ValueError for a model without such a module: its tokens would meet those of their piece alone.
    """
    found: list[Any] = [module for module in model.modules() if hasattr(module, "attend")]
    if not found:
        raise ValueError(f"{type(model).__name__} has no module with `attend`")
    for module in found:
        module.attend = partial(attend_over, group, module.attend)


def attend_over(
    group: dist.ProcessGroup, attend: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Any
) -> Tensor:
    """`attend` of pieces: (N, heads, tokens / ranks, width) each -> as the queries. A collective call.

    The number of ranks divides the heads of queries. Where it doesn't divide those of keys and values, which serve
    several queries each, they are sent as often as ranks need them, and their gradients are summed. Copies of a key
    stand beside each other, so each rank gets with its queries the keys that serve them.
    """
    often = group.size() // math.gcd(key.shape[1], group.size())
    key, value = (one.repeat_interleave(often, dim=1) for one in (key, value))
    query, key, value = (heads_for_tokens(one, group) for one in (query, key, value))
    return tokens_for_heads(attend(query, key, value, mask), group)


def heads_for_tokens(piece: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All heads of a piece for some of all tokens. A collective call, in backward too.

    (N, heads, tokens / ranks, width) -> (N, heads / ranks, tokens, width).
    """
    sent = torch.stack(piece.chunk(group.size(), dim=1))
    return torch.cat(list(_Exchange.apply(sent, group)), dim=2)


def tokens_for_heads(heads: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back. A collective call, in backward too.

    (N, heads / ranks, tokens, width) -> (N, heads, tokens / ranks, width).
    """
    sent = torch.stack(heads.chunk(group.size(), dim=2))
    return torch.cat(list(_Exchange.apply(sent, group)), dim=1)


class _Exchange(torch.autograd.Function):
    """Part r of the first dimension goes to rank r, and from it comes a part in the same place; gradients go back."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradient.contiguous(), ctx.group), None

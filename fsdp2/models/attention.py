"""Attention by one of torch's kernels, or by FlexAttention where documents of a row don't see each other.

A mask has a place for each pair of a query and a key, T x T in a row, and torch's flash kernel takes none.
FlexAttention needs to know of blocks of 128 x 128 pairs which are empty and which are full, (T / 128)^2 numbers; in the
others it compares the numbers of documents. Source: https://arxiv.org/abs/2412.05496
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2.models.names import KERNELS

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Mask: TypeAlias = "Tensor | BlockMask | None"

BLOCK = 128  # queries and keys, as FlexAttention takes them by default


def way(choice: str, device_type: str, *, apart: bool) -> str:
    """The way in which a model that can choose attends: `flex`, a kernel's name, or `auto` for torch's choice.

    On a CPU FlexAttention has no backward, and without a compiler it would hold the scores of all pairs.

    Args:
        choice: one of `names.ATTENTIONS`.
        apart: rows have several documents, which don't see each other.
    """
    flex = device_type == "cuda" and (choice == "flex" or (choice == "auto" and apart and missing() is None))
    return "flex" if flex else "auto" if choice == "flex" else choice


@cache
def missing() -> str | None:
    """Name what FlexAttention's compiler lacks on this machine: a Python package, or a C compiler that it calls."""
    if importlib.util.find_spec("triton") is None:
        return "triton"
    found = any(shutil.which(name) for name in (os.environ.get("CC"), "gcc", "clang") if name)
    return None if found else "a C compiler"


def mask_of(document_ids: Tensor | None, like: Tensor, choice: str) -> Mask:
    """Make `attend`'s mask for documents (N, T), None for one in each row: a tensor, blocks, or None for causal.

    Args:
        like: (N, T, …), on the device of the queries.
    """
    if way(choice, like.device.type, apart=document_ids is not None) == "flex":
        return block_mask(like.new_zeros(like.shape[:2], dtype=torch.int64) if document_ids is None else document_ids)
    return None if document_ids is None else document_mask(document_ids)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """Queries (N, heads, T, width), keys and values of as many heads or fewer -> as the queries."""
    if mask is None or isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
    from torch.nn.attention.flex_attention import flex_attention

    attends: Any = flex_attention if torch.compiler.is_compiling() else flex()
    query, key = query.to(value.dtype), key.to(value.dtype)  # autocast knows scaled_dot_product_attention alone
    mixed: Tensor = attends(query, key, value, block_mask=mask, enable_gqa=True)
    return mixed


def document_mask(document_ids: Tensor) -> Tensor:
    """The mask by which a token sees none of another document, and none after it. (N, T) -> (N, 1, T, T) bool."""
    same = document_ids.unsqueeze(1) == document_ids.unsqueeze(2)
    return same.tril().unsqueeze(1)


def block_mask(document_ids: Tensor) -> BlockMask:
    """The same as `document_mask`, (N, T) -> blocks; nothing of the size T x T is made, and nothing is waited for."""
    from torch.nn.attention.flex_attention import BlockMask

    rows, length = document_ids.shape
    rest = -length % BLOCK
    lowest = F.pad(document_ids, (0, rest), value=2**31 - 1).view(rows, 1, -1, BLOCK).amin(-1)
    highest = F.pad(document_ids, (0, rest), value=-1).view(rows, 1, -1, BLOCK).amax(-1)
    number = torch.arange(lowest.shape[-1], device=document_ids.device)
    # Of each block of queries (dimension -2) and of keys (-1): documents from `lowest` to `highest` may be in it.
    shared = (lowest.unsqueeze(-2) <= highest.unsqueeze(-1)) & (highest.unsqueeze(-2) >= lowest.unsqueeze(-1))
    some = shared & (number.unsqueeze(-1) >= number)
    one = (lowest == highest) & (number < length // BLOCK)  # a block with a rest isn't full
    full = some & one.unsqueeze(-1) & one.unsqueeze(-2) & (number.unsqueeze(-1) > number)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_ids[row, query] == document_ids[row, key])

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        return blocks.sum(-1, dtype=torch.int32), blocks.int().argsort(dim=-1, descending=True, stable=True).int()

    return BlockMask.from_kv_blocks(
        *listed(some & ~full), *listed(full), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )


@cache
def flex() -> Callable[..., Tensor]:
    """FlexAttention, (N, heads, T, width) as `attend`, compiled: as it is, it would hold the scores of all pairs."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


def kernels(choice: str) -> AbstractContextManager[Any]:
    """Let `F.scaled_dot_product_attention` use that kernel alone, on all threads: backward recomputes on another."""
    if choice not in KERNELS:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    by_name = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    return sdpa_kernel(by_name[choice])


class MeetsConditions(TorchDispatchMode):
    """Meets a condition on values, which `meta` lacks: models of transformers ask whether a mask hides nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool
        return True if asks else func(*args, **(kwargs or {}))

"""Llama 3, to be read: RMSNorm, rotary positions, grouped-query attention, SwiGLU, documents that don't see each other.

Sources: https://arxiv.org/abs/2407.21783 (the model), https://arxiv.org/abs/1910.07467 (RMSNorm),
https://arxiv.org/abs/2104.09864 (RoPE), https://arxiv.org/abs/2305.13245 (grouped queries) and
https://arxiv.org/abs/2002.05202 (SwiGLU). Modules have the names of Hugging Face's LlamaForCausalLM, so weights go to
it and come from it as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from fsdp2.models.attention import Mask, attend, mask_of
from fsdp2.models.initial import Table, normal, ones
from fsdp2.models.names import ATTENTIONS
from fsdp2.models.spec import ModelSpec
from fsdp2.models.transformer import loss

_LLAMA_3 = {"vocab_size": 128256, "kv_heads": 8, "rope_theta": 500_000.0}
# Up to 160m the sizes are for trying things out: bytes as tokens, and that of JackFram/llama-160m. The others are those
# of Llama 3.2 1B and Llama 3.1; `rope_factor` stretches the positions of what was trained on 8,192 tokens.
SIZES: dict[str, dict[str, Any]] = {
    "debug": {"vocab_size": 256, "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 176},
    "10m": {"vocab_size": 256, "dim": 384, "layers": 6, "heads": 6, "kv_heads": 2, "hidden": 1024},
    "160m": {"vocab_size": 32000, "dim": 768, "layers": 12, "heads": 12, "kv_heads": 12, "hidden": 3072},
    "1b": {**_LLAMA_3, "dim": 2048, "layers": 16, "heads": 32, "hidden": 8192, "tied": True, "rope_factor": 32.0},
    "8b": {**_LLAMA_3, "dim": 4096, "layers": 32, "heads": 32, "hidden": 14336, "rope_factor": 8.0},
    "70b": {**_LLAMA_3, "dim": 8192, "layers": 80, "heads": 64, "hidden": 28672, "rope_factor": 8.0},
    "405b": {**_LLAMA_3, "dim": 16384, "layers": 126, "heads": 128, "hidden": 53248, "rope_factor": 8.0},
}
EPS = 1e-5

INITIAL_VALUES: Table = {"*norm.weight": ones, "*.weight": normal(0.02)}


def frequencies(width: int, theta: float, factor: float | None, device: torch.device) -> Tensor:
    """The angle by which each pair of a head's numbers turns from one position to the next, (width / 2,) float32.

    With a factor, as Llama 3.1 does it: turns that are longer than 8,192 positions take `factor` times as long, those
    shorter than 8,192 / 4 stay, and between the two it goes over smoothly.
    """
    pairs = torch.arange(0, width, 2, dtype=torch.int64, device=device).float() / width
    turns = 1.0 / (theta**pairs)
    if factor is None:
        return turns
    trained, low, high = 8192, 1.0, 4.0
    lengths = 2 * math.pi / turns
    smooth = (trained / lengths - low) / (high - low)
    between = (1 - smooth) * turns / factor + smooth * turns
    slow = torch.where(lengths > trained / low, turns / factor, turns)
    return torch.where((lengths <= trained / low) & (lengths >= trained / high), between, slow)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of each head by its position's angles: (N, heads, T, width) -> the same."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class RMSNorm(nn.Module):
    """(…, dim) -> (…, dim), of root mean square 1 before the weight; computed in fp32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """(…, dim), any floating dtype -> the same shape and dtype; the mean of squares is taken in fp32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """(N, T, dim) -> (N, T, dim); a key and a value serve heads / kv_heads queries."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.width, self.attend = dim // heads, attend  # which may be done over ranks
        self.q_proj = nn.Linear(dim, heads * self.width, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(heads * self.width, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        """x (N, T, dim); cos, sin (N or 1, 1, T, width); mask as `attention.mask_of` gives it -> (N, T, dim)."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.o_proj(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: (N, T, dim) -> (N, T, dim)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, dim) -> (N, T, dim)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """(N, T, dim) -> (N, T, dim)."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.self_attn = Attention(dim, heads, kv_heads)
        self.mlp = MLP(dim, hidden)
        self.input_layernorm = RMSNorm(dim)
        self.post_attention_layernorm = RMSNorm(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        """(N, T, dim) -> (N, T, dim); the other arguments are those of `Attention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """(N, T) tokens -> (N, T, dim)."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        layers: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        theta: float,
        factor: float | None,
        attention: str,
    ) -> None:
        super().__init__()
        self.width, self.theta, self.factor, self.attention = dim // heads, theta, factor, attention
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList([Block(dim, heads, kv_heads, hidden) for _ in range(layers)])
        self.norm = RMSNorm(dim)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None, document_ids: Tensor | None) -> Tensor:
        """Tokens (N, T), int64 -> (N, T, dim); positions and documents, (N, T), are None for one document a row."""
        x = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        # Computed in each forward, and in fp32: a table would be a buffer, which meta, to_empty and bf16 all spoil.
        angles = position_ids.unsqueeze(-1) * frequencies(self.width, self.theta, self.factor, x.device)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mask = mask_of(document_ids, x, self.attention)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)


class Llama(nn.Module):
    """(N, T) tokens -> (N, T, vocab_size) logits.

    Args:
        attention: one of `names.ATTENTIONS`.
        position_ids: (N, T), from 0 in each document; None = from 0 in each row.
        document_ids: (N, T), the same number within a document; None = a row is one.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        layers: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        *,
        tied: bool = False,
        rope_theta: float = 10_000.0,
        rope_factor: float | None = None,
        attention: str = "auto",
    ) -> None:
        super().__init__()
        self.model = Decoder(vocab_size, dim, layers, heads, kv_heads, hidden, rope_theta, rope_factor, attention)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """Tokens (N, T), int64 -> logits (N, T, vocab_size), in the parameters' dtype."""
        return self.lm_head(self.model(input_ids, position_ids, document_ids))


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The decoder's layers, in forward order."""
    assert isinstance(model, Llama)
    return list(model.model.layers)


def head(model: Any) -> nn.Module:
    """The layer that makes logits of hidden states."""
    assert isinstance(model, Llama)
    return model.lm_head


def splits() -> Mapping[str, ParallelStyle]:
    """The split of each layer between ranks: heads, hidden numbers, words, and between blocks the tokens of a row."""
    tokens, whole = Shard(1), Replicate()
    gathered = (whole, None, None, None)
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_layouts=(tokens, None, None, None), desired_input_layouts=gathered
        ),
        **dict.fromkeys((f"model.layers.*.self_attn.{name}_proj" for name in "qkv"), ColwiseParallel()),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=tokens),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole),
        **dict.fromkeys((f"model.layers.*.mlp.{name}_proj" for name in ("gate", "up")), ColwiseParallel()),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=tokens),
        "model.norm": SequenceParallel(),
        # The logits stay split by words: whole, they would be the largest tensor of a step.
        "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
    }


def files(size: str) -> Mapping[str, bytes]:
    """config.json, by which transformers makes the same model."""
    numbers = SIZES[size]
    scaled = numbers.get("rope_factor")
    rope = {"rope_type": "llama3", "factor": scaled, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": numbers["vocab_size"],
        "hidden_size": numbers["dim"],
        "intermediate_size": numbers["hidden"],
        "num_hidden_layers": numbers["layers"],
        "num_attention_heads": numbers["heads"],
        "num_key_value_heads": numbers["kv_heads"],
        "tie_word_embeddings": numbers.get("tied", False),
        "rope_theta": numbers.get("rope_theta", 10_000.0),
        "rope_scaling": {**rope, "original_max_position_embeddings": 8192} if scaled else None,
        "max_position_embeddings": 131072 if scaled else 8192,
        "rms_norm_eps": EPS,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return {"config.json": (json.dumps(config, indent=1) + "\n").encode()}


SPEC = ModelSpec(
    "llama",
    "language",
    SIZES,
    Llama,
    blocks,
    INITIAL_VALUES,
    loss,
    files=files,
    head=head,
    attentions=ATTENTIONS,
    flex_for_documents=True,
    splits=splits,
    split_sizes=lambda size, seq_len: (
        {name: size[name] for name in ("heads", "kv_heads", "hidden", "vocab_size")} | {"--seq-len": seq_len}
    ),
    attends_by_name=True,
)

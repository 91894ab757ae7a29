"""The simplified transformer of the FSDP2 guide: its `attention` is a linear layer, so it predicts a token
from the one before it. What it shows is sharding, not language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from fsdp2.models.initial import Table, fan_in_uniform, normal, ones, zeros
from fsdp2.models.spec import Batch, ModelSpec, plain

SIZES = {
    "debug": {"vocab_size": 256, "dim": 64, "num_layers": 3},
    "seed": {"vocab_size": 10000, "dim": 512, "num_layers": 3},
    "wide": {"vocab_size": 32000, "dim": 1024, "num_layers": 12},
}

# As nn.Embedding, nn.LayerNorm and nn.Linear draw them; biases at zero (their fan-in is not in their shape).
INITIAL_VALUES: Table = {
    "tok_embeddings.weight": normal(1.0),
    "*.norm?.weight": ones,
    "*.weight": fan_in_uniform,
    "*.bias": zeros,
}


class TransformerBlock(nn.Module):
    """(N, T, dim) -> (N, T, dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim * 4), nn.ReLU(), nn.Linear(dim * 4, dim))
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, dim) -> (N, T, dim); no causal mask, as in the guide."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """(N, T) tokens -> (N, T, vocab_size) logits."""

    def __init__(self, vocab_size: int = 10000, dim: int = 512, num_layers: int = 3) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList([TransformerBlock(dim) for _ in range(num_layers)])
        self.output = nn.Linear(dim, vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (N, T), int64 -> logits (N, T, vocab_size)."""
        x = self.tok_embeddings(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The layers, in forward order."""
    assert isinstance(model, Transformer)
    return list(model.layers)


def head(model: nn.Module) -> nn.Module:
    """The layer that makes logits of hidden states."""
    assert isinstance(model, Transformer)
    return model.output


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross-entropies, 0-d fp32, of (N, T, vocabulary) logits and (N, T) targets.

    A collective call where ranks hold the logits by words.
    """
    return plain(F.cross_entropy(outputs.float().flatten(0, 1), targets.flatten(), reduction="sum"))


def call(model: nn.Module, batch: Batch) -> Tensor:
    """The logits, (N, T, vocab_size), of a batch's tokens."""
    # No token sees another, so documents in one row are apart already.
    return model(batch.inputs["input_ids"] if isinstance(batch.inputs, dict) else batch.inputs)


def splits() -> Mapping[str, ParallelStyle]:
    """The split of each layer between ranks, and of a row's tokens between blocks; a row-wise bias is added once."""
    tokens, whole = Shard(1), Replicate()
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "layers.*.norm?": SequenceParallel(),
        "layers.*.attention": ColwiseParallel(input_layouts=tokens, output_layouts=tokens),
        "layers.*.mlp.0": ColwiseParallel(input_layouts=tokens),
        "layers.*.mlp.2": RowwiseParallel(output_layouts=tokens),
        "output": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
    }


SPEC = ModelSpec(
    "transformer",
    "language",
    SIZES,
    Transformer,
    blocks,
    INITIAL_VALUES,
    loss,
    call,
    head=head,
    splits=splits,
    split_sizes=lambda size, seq_len: {name: size[name] for name in ("dim", "vocab_size")} | {"--seq-len": seq_len},
)

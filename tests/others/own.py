"""Models as users have them in their own repository, for `--model tests.others.own:NAME`."""

from __future__ import annotations

import dataclasses
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2.models.initial import normal, ones, zeros
from fsdp2.models.spec import ModelSpec
from fsdp2_extra.models.blocks import find_blocks

WIDTH = 32


class Block(nn.Module):
    """With statistics that a forward changes, and with numbers by chance that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("noise", torch.rand(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)) * self.noise


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(784, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Normed(Block):
    """Without a buffer of its own, whose fp32 would go on into what computes in another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))


def net() -> nn.Module:
    return Net()


class Direct(Net):
    """Doesn't call its blocks, so that no hook of theirs runs."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1))
        for block in self.blocks:
            x = block.forward(x)
        return self.head(x)


class Table(nn.Module):
    """Returns a view of its parameter, as layers of learned positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 49, 784))

    def forward(self) -> Tensor:
        return self.weight[0]


class Positions(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Table(), Normed(), Normed()])

    def forward(self, x: Tensor) -> Tensor:
        table, *blocks = self.blocks
        positions = table()
        x = self.stem(x.flatten(1) + positions.mean(0))
        for block in blocks:
            x = block(x)
        return self.head(x)


def positions() -> nn.Module:
    return Positions()


def normed() -> nn.Module:
    model = Net()
    model.blocks = nn.ModuleList([Normed() for _ in range(2)])
    return model


def direct() -> nn.Module:
    return Direct()


def sequential() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def flat() -> nn.Module:
    """Without a list of anything."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(784, 64), nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x.flatten(1)).relu())

    return Flat()


class Half(nn.Linear):
    """A linear layer in bf16 inside of a model in fp32."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.bfloat16)).to(x.dtype)


def mixed() -> nn.Module:
    model = Net()
    for block in model.blocks:
        block.linear = Half()
    return model


def mixed_in_one_module() -> nn.Module:
    model = Net()
    model.blocks[0].register_parameter("extra", nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16)))
    return model


def scalar() -> nn.Module:
    model = Net()
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    return model


def forgets() -> nn.Module:
    """A buffer that was computed from a parameter."""
    model = Net()
    model.register_buffer("copy", model.stem.weight.detach() * 2, persistent=False)
    return model


class Words(nn.Module):
    """Of language, and with a loss of its own: `ModelSpec` says so."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        self.scale = nn.Parameter(torch.empty(WIDTH))

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * (1 + self.scale)
        for layer in self.layers:
            x = x + layer(x).relu()
        return x

    def scores(self, tokens: Tensor) -> Tensor:
        """(N, T) -> (N,): another way in than forward."""
        return (self.features(tokens) * (1 + self.scale)).sum((1, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens))


def words() -> ModelSpec:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=0.1)

    table = {"*.bias": zeros, "*": normal(0.02)}
    sizes = {"small": {"vocab_size": 256}}
    return ModelSpec("words", "language", sizes, Words, find_blocks, table, loss, methods=("scores",))


def without_method() -> ModelSpec:
    return dataclasses.replace(words(), methods=("generate",))


class Sparse(nn.Module):
    """A token passes through one expert, by its number: a batch decides which are called."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        scores = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = tokens % 3 == number
            if chosen.any():
                out[chosen] = expert(x[chosen]) * scores[chosen][:, number : number + 1]
        return x + out, {"scores": scores}


class SparseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.sparse = Sparse()

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out, more = self.sparse(self.norm(x), tokens)
        return x + out, more


class SparseWords(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        self.layers = nn.ModuleList([SparseBlock() for _ in range(2)])
        self.head = nn.Linear(WIDTH, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x, balance = self.embedding(tokens), torch.zeros(())
        for layer in self.layers:
            x, more = layer(x, tokens)
            balance = balance + more["scores"].square().mean()
        return self.head(x) + balance


def sparse() -> ModelSpec:
    """A mixture of experts, each a module of its own."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")

    table = {"*.bias": zeros, "*norm.weight": ones, "*": normal(0.02)}
    return ModelSpec("sparse", "language", {"small": {"vocab_size": 30}}, SparseWords, find_blocks, table, loss)


def number() -> int:
    return 3


def fails() -> nn.Module:
    raise ValueError("not\ntoday")


def leaves() -> nn.Module:
    sys.exit(3)


made: list[int] = []


def grows() -> nn.Module:
    made.append(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8 + len(made)), nn.Linear(8 + len(made), 10))


def of_this_rank() -> nn.Module:
    width = 8 + (dist.get_rank() if dist.is_initialized() else 0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.Linear(width, 10))


def of_no_kind() -> ModelSpec:
    return dataclasses.replace(words(), kind="audio")


def without_token() -> ModelSpec:
    return dataclasses.replace(words(), task="masked")


def without_sizes() -> ModelSpec:
    return dataclasses.replace(words(), sizes={})


def of_other_numbers() -> ModelSpec:
    return dataclasses.replace(words(), sizes={"small": {"words": 256}})


def half_a_table() -> ModelSpec:
    return dataclasses.replace(words(), initial_values={"*.bias": zeros})


def blocks_of_another() -> ModelSpec:
    return dataclasses.replace(words(), blocks=lambda model: [nn.Linear(2, 2)])


def blocks_twice() -> ModelSpec:
    return dataclasses.replace(words(), blocks=lambda model: [model.layers, model.layers[0]])


constant = 3


class Mixing(nn.Module):
    """Tokens in one space with attention over a row, which a layer of zeros after it hides before training."""

    def __init__(self, *, causal: bool, zeros: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList([_Attending(causal=causal) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for name, parameter in self.named_parameters():
            if zeros in name:
                nn.init.zeros_(parameter)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Attending(nn.Module):
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal, self.into, self.out = causal, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.into(x)[:, None]
        seen = F.scaled_dot_product_attention(q, q, q, is_causal=self.causal)[:, 0]
        return x + self.out(seen)


def _mixing(*, causal: bool, zeros: str) -> ModelSpec:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="sum")

    def make(vocab_size: int = 256) -> nn.Module:
        return Mixing(causal=causal, zeros=zeros)

    return ModelSpec("mixing", "language", {"own": {"vocab_size": 256}}, make, find_blocks, {}, loss)


def sees_later_behind_a_head() -> ModelSpec:
    return _mixing(causal=False, zeros="head")


def sees_later_behind_a_projection() -> ModelSpec:
    return _mixing(causal=False, zeros="out")


def sees_documents_behind_a_head() -> ModelSpec:
    return _mixing(causal=True, zeros="head")


class Growing(nn.Module):
    """No token sees another, and a table of places becomes longer where one is behind its end."""

    table: Tensor

    def __init__(self, vocab_size: int = 256) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, WIDTH), nn.Linear(WIDTH, vocab_size)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.register_buffer("table", torch.zeros(0, WIDTH), persistent=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        if (end := int(position_ids.max()) + 1) > len(self.table):
            self.table = torch.arange(end)[:, None].expand(-1, WIDTH).cos()
        return self.head(self.blocks[0](self.embedding(input_ids) + self.table[position_ids]))


def growing() -> ModelSpec:
    return dataclasses.replace(_mixing(causal=True, zeros="none"), make=Growing)

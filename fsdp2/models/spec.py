"""The facts about a model that the rest of the program needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2.models.initial import Table, slices_of
from fsdp2.models.meta import parameters_on_meta

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from fsdp2_extra.models.lora import Lora


class Batch(Protocol):
    """The input of a model.

    Attributes:
        inputs: what a forward takes: one tensor, or tensors by the names of its arguments.
        targets: class numbers; -100 where there is nothing to predict.
    """

    @property
    def inputs(self) -> Any:
        """One tensor, or tensors by the names of the forward's arguments; the first dimension is the sample."""

    @property
    def targets(self) -> Tensor:
        """Class numbers, int64; -100 where there is nothing to predict."""


def call_model(model: nn.Module, batch: Batch) -> Any:
    """The outputs of a model that takes the batch's inputs as they are."""
    return model(**batch.inputs) if isinstance(batch.inputs, dict) else model(batch.inputs)


def outputs_are_logits(outputs: Tensor) -> Tensor:
    """For a model that returns a tensor of logits, (…, classes), as they are."""
    return outputs


def plain(number: Tensor) -> Tensor:
    """A number, 0-d, that is the same on all ranks of its mesh, as a plain tensor: a loss of logits split by words."""
    return number.to_local() if isinstance(number, DTensor) else number


def likeliest(logits: Tensor) -> Tensor:
    """The class with the largest number, (…, classes) -> (…) int64. A collective call where ranks hold them by classes.

    Then two numbers a rank and target travel, and not the logits.
    """
    if not isinstance(logits, DTensor):
        return logits.argmax(dim=-1)
    value, index = logits.to_local().max(dim=-1, keepdim=True)
    index = index + slices_of(logits)[-1].start
    values, indices = (
        DTensor.from_local(mine, logits.device_mesh, logits.placements, run_check=False).full_tensor()
        for mine in (value, index)
    )
    return indices.gather(-1, values.argmax(dim=-1, keepdim=True)).squeeze(-1)


def no_files(size: str) -> Mapping[str, bytes]:
    """For a model that leaves nothing beside its weights."""
    return {}


@dataclass(frozen=True)
class ModelSpec:
    """A family of models.

    Attributes:
        name: what `--model` calls it.
        kind: `image` or `language`: which data it takes.
        sizes: a table of named sizes; each is the keyword arguments of `make`. The first is the default.
        make: builds the module on the current device, `meta` included.
        blocks: the modules, in the order of the forward, that sharding, recomputation and compilation take
            as their unit; `find_blocks` for a model that isn't known.
        initial_values: name pattern -> distribution, for every parameter and buffer; empty = what `make` gives them.
        loss: (outputs, targets) -> the **sum** of the losses of all targets but those that are -100, 0-d.
        call: (model, batch) -> outputs; the model may be wrapped by a strategy.
        logits: outputs -> a number for each target and class, (…, classes).
        classes: of a model for images, how many it tells apart.
        task: of a language model, what it learns: `causal` (the next token), `masked` (tokens that are hidden), or
            `seq2seq` (by a decoder, what follows on that which its encoder got).
        special_token: of a language model that learns something else than the next token: the one that hides others, or
            that a decoder begins with.
        positions: of a language model, how many its configuration says that it has; None if it says nothing.
        weights: the folder whose weights a run starts from unless it names another.
        load: reads a folder by the model's own library, for files whose tensors have other names or shapes than the
            model's. Returns the whole state dict and name -> why, of what has no weights of theirs. Raises ValueError
            if there is such, unless it is called with `partial=True`. With `read=False` it only looks at the files,
            and the tensors are on `meta`; `packed` are names in them of integers, and of numbers of 8 bits.
        files: size -> name -> content of what belongs to the model and a run keeps with its checkpoints: configuration,
            tokenizer.
        lora: of a model with adapters, which they are.
        methods: those of the module beside `forward` that compute with its parameters, such as `generate`.
        head: the layer whose output are the logits; None for a model that doesn't tell.
        scores: (outputs, targets) -> the sum of losses and the number of targets that are the likeliest class.
        whole: of a model whose loss is made in chunks, the specification that makes whole logits.
        splits: for tensor parallelism, names of its modules, with `*`, and torch's style for each; None if it has none.
            It raises ValueError for a model of which only a look at it tells that it has none.
        split_sizes: (a size's keyword arguments, length of a sequence) -> by name, the numbers that ranks must divide.
        attends_by_name: whether its modules attend by `self.attend`, so that ranks can exchange heads for tokens.
        attentions: which of `names.ATTENTIONS` it can follow: `auto` alone, or `BY_TORCH` where it attends by
            `F.scaled_dot_product_attention`. With `flex` among them, `make` takes the choice as `attention`.
        flex_for_documents: whether `auto` is `flex` on a GPU, where documents of a row don't see each other.
    """

    name: str
    kind: str
    sizes: Mapping[str, Mapping[str, Any]]
    make: Callable[..., nn.Module]
    blocks: Callable[[Any], Sequence[nn.Module]]
    initial_values: Table
    loss: Callable[[Any, Tensor], Tensor]
    call: Callable[[nn.Module, Batch], Any] = call_model
    logits: Callable[[Any], Tensor] = outputs_are_logits
    classes: int = 10
    task: str = "causal"
    special_token: int | None = None
    positions: int | None = None
    weights: Path | None = None
    load: Callable[..., tuple[Mapping[str, Tensor], Mapping[str, str]]] | None = None
    files: Callable[[str], Mapping[str, bytes]] = no_files
    lora: Lora | None = None
    methods: Sequence[str] = ()
    head: Callable[[Any], nn.Module | None] | None = None
    scores: Callable[[Any, Tensor], tuple[Tensor, Tensor]] | None = None
    whole: ModelSpec | None = None
    splits: Callable[[], Mapping[str, ParallelStyle]] | None = None
    split_sizes: Callable[[Mapping[str, Any], int], Mapping[str, int]] = lambda *_: {}
    attends_by_name: bool = False
    attentions: Sequence[str] = ("auto",)
    flex_for_documents: bool = False

    def base_weights(self, weights: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
        """Of weights, by name, those that a model without adapters has, under their names in it."""
        named = weights if isinstance(weights, Mapping) else dict.fromkeys(weights)
        if self.lora is None:
            return dict(named)
        from fsdp2_extra.models.lora import base_weights

        return base_weights(named)

    def scored(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of losses and the number of targets that are the likeliest class, both 0-d.

        A collective call where ranks hold the logits by classes.
        """
        if self.scores is not None:
            return self.scores(outputs, targets)
        return self.loss(outputs, targets), (likeliest(self.logits(outputs)) == targets).sum()

    def build(self, size: str) -> nn.Module:
        """The module of a named size, on the current device."""
        model = self.make(**self.sizes[size])
        if not self.initial_values:
            saved = model.state_dict()
            for name, buffer in self.on_meta(size).named_buffers():
                if name not in saved and not buffer.is_meta:
                    model.get_buffer(name).copy_(buffer)
        return model

    def on_meta(self, size: str) -> nn.Module:
        """The module without memory for its parameters. Without a table its buffers have their values, on the CPU."""
        if self.initial_values:
            with torch.device("meta"):
                return self.make(**self.sizes[size])
        # Buffers that are drawn and that no state dict holds have to be the same on every rank, and after a resume.
        with torch.random.fork_rng(devices=[]), parameters_on_meta():
            torch.manual_seed(0)
            return self.make(**self.sizes[size])

    def described(self, size: str) -> nn.Module:
        """`on_meta`, made once, for whoever reads names and shapes; nobody changes it."""
        made: dict[str, nn.Module] = self.__dict__.setdefault("_described", {})
        if size not in made:
            made[size] = self.on_meta(size)
        return made[size]

    def vocab_size(self, size: str) -> int | None:
        """Tokens in the vocabulary of a language model, else None."""
        return self.sizes[size].get("vocab_size")

"""Try a stranger's model before the first step: facts that only a forward tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fsdp2 import models
from fsdp2.config import Config
from fsdp2.data.loader import Batch, evaluation_batches
from fsdp2.data.pieces import piece_of
from fsdp2.data.splits import Dataset
from fsdp2.models import chunked
from fsdp2.models.spec import ModelSpec
from fsdp2.options.errors import ConfigError
from fsdp2.parallel.compiling import uncompiled
from fsdp2.parallel.engine import Engine
from fsdp2.run.process import runtime
from fsdp2.run.process.group import gather

# Few enough that their whole logits take less memory than a step: 33 MB of fp32 for 128,000 classes.
TOKENS = 64


@contextmanager
def whole_logits(engine: Engine, spec: ModelSpec) -> Iterator[ModelSpec]:
    """Let an engine give logits in the body, with `--chunked-loss` too. Yields the specification that reads them."""
    before, plain = engine.call, spec.whole or spec
    engine.call = plain.call
    try:
        with engine.evaluating():
            yield plain
    finally:
        engine.call = before


def try_out(config: Config, engine: Engine, dataset: Dataset, device: torch.device) -> None:
    """Raise ConfigError on every rank if the model doesn't do what was asked, which only a forward tells.

    A collective call.
    """
    with uncompiled() if config.compile else nullcontext():
        if config.chunked_loss is not None:
            require_whole_loss(config, engine, dataset, device)
        require_causal(config, engine, dataset, device)
        require_documents_apart(config, engine, dataset, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # no step has tensors of these sizes


def cut(config: Config, rows: Any) -> Any:
    """The first tokens of rows, one tensor or several by name: at most `TOKENS`, and as many for each rank."""
    length = TOKENS - TOKENS % (config.tp * config.sp)
    return {name: one[:, :length] for name, one in rows.items()} if isinstance(rows, dict) else rows[:, :length]


def piece_of_rank(config: Config, inputs: Any) -> Any:
    """This rank's piece of the inputs, with `--sp`."""
    return inputs if config.sp == 1 else piece_of(inputs, runtime.world().share(config.tp, config.sp).piece, config.sp)


def place_in_piece(config: Config, piece: Any, place: int | None) -> int | None:
    """The number of tokens of this rank's piece before a place in the row."""
    if config.sp == 1 or place is None:
        return place
    length = piece["input_ids"].shape[1]
    return min(max(0, place - runtime.world().share(config.tp, config.sp).piece * length), length)


def first_tokens(config: Config, batch: Batch) -> Batch:
    """A batch's first tokens with something to predict; with `--sp` this rank's piece of them."""
    targets: Tensor = cut(config, batch.targets).clamp(min=0)  # class 0 where nothing is, as in a question of a chat
    targets = targets.chunk(config.sp, dim=1)[runtime.world().share(config.tp, config.sp).piece]
    return dataclasses.replace(batch, inputs=piece_of_rank(config, cut(config, batch.inputs)), targets=targets)


def require_whole_loss(config: Config, engine: Engine, dataset: Dataset, device: torch.device) -> None:
    """Raise ConfigError if the loss in chunks isn't that of the logits, which a model may scale. A collective call."""
    spec, told = config.spec, f"--chunked-loss with --model {config.model}:"
    batch = first_tokens(config, next(evaluation_batches(dataset.test, 1, 0, 1, device)))
    if not all(gather(_leaves_sums_alone(engine, spec, batch))):
        raise ConfigError(f"{told} the model does something to its logits after its last layer, such as a cap; drop it")
    with whole_logits(engine, spec) as plain:
        expected = plain.loss(engine.forward(batch), batch.targets)
    with engine.evaluating():
        found = spec.loss(engine.forward(batch), batch.targets)
    # The sum is rounded in another order.
    if not all(gather(bool(torch.allclose(found.double(), expected.double(), rtol=1e-3, equal_nan=True)))):
        raise ConfigError(f"{told} its loss would be {found.item():g} in place of {expected.item():g}; drop it")


def _leaves_sums_alone(engine: Engine, spec: ModelSpec, batch: Batch) -> bool:
    """Return whether what the last layer gives comes out of the model as it is. A collective call.

    Of 64 tokens the sums may be as far below a cap as no microbatch's are.
    """
    numbers = (2.0**40, -1.0)  # a cap changes what is large, a bias what is small
    with chunked.instead_of_sums(numbers) as instead:
        try:
            with engine.evaluating():
                found = spec.logits(engine.forward(batch))
        except (RuntimeError, TypeError, ValueError, IndexError):
            if not instead.given:
                raise
            return False  # such as a bias of another shape
    return tuple(one.item() for one in found) == numbers


def _seen_by_a_copy(config: Config, look: Callable[..., bool | None]) -> bool:
    """Let `models.causal` look at a function's model; False where it can't tell, or the model is another's.

    Libraries' models have weights or initial values that show what they see; a stranger's may begin with zeros.
    """
    if not models.is_function(config.model):
        return False
    spec = config.spec.whole or config.spec
    return bool(look(spec.on_meta(config.model_size), spec.call, spec.logits))


def _logits(config: Config, engine: Engine, rows: Any, region: slice) -> Tensor:
    """This rank's logits of a region of three rows. A collective call."""
    tokens = rows["input_ids"] if isinstance(rows, dict) else rows
    piece = piece_of_rank(config, rows)
    with whole_logits(engine, config.spec) as plain:
        batch = Batch(piece, tokens, valid=True, samples=3, target_count=tokens.numel(), last=True)
        logits = plain.logits(engine.forward(batch))
    first, end = (place_in_piece(config, piece, place) for place in (region.start, region.stop))
    return logits[:, first:end].nan_to_num(0.0, 0.0, 0.0)  # of a run whose weights are NaN they tell nothing


def _differ(logits: Tensor) -> bool:
    """Return whether those of the last of three rows differ from the others'."""
    from fsdp2_extra.models.causal import same

    return logits.numel() > 0 and not same(logits)


@torch.no_grad()
def require_causal(config: Config, engine: Engine, dataset: Dataset, device: torch.device) -> None:
    """Raise ConfigError if somebody's model that is to learn the next token sees it.

    Of three rows of one forward the last differs in one token, and the logits before it have to be equal. Of a
    function's model a copy with other weights is tried, too. A collective call.
    """
    if ":" not in config.model or config.spec.task != "causal":
        return
    from fsdp2_extra.models.causal import sees_later

    inputs, _ = dataset.test.__getitems__([0])
    named = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    rows = {name: tensor[:1].repeat(3, 1).to(device) for name, tensor in cut(config, named).items()}
    tokens = rows["input_ids"]
    at = tokens.shape[1] // 2
    tokens[2, at] = abs(int(tokens[2, at]) - 1)
    seen = _differ(_logits(config, engine, rows if isinstance(inputs, dict) else tokens, slice(at)))
    if any(gather(seen or _seen_by_a_copy(config, sees_later))):
        raise ConfigError(
            f"--model {config.model}: it sees the tokens that it is to predict, since a later token changes the logits "
            "of those before it; give it a causal mask, which encoders of transformers have with is_decoder true"
        )


@torch.no_grad()
def require_documents_apart(config: Config, engine: Engine, dataset: Dataset, device: torch.device) -> None:
    """Raise ConfigError if the model lets a document see another in its row.

    A signature doesn't show whether a model uses `position_ids` or `document_ids`, so test it: of three rows the last
    has another first document, and the logits of the second have to be equal. They stand in one forward, since experts
    that get other numbers of tokens in another forward round differently. A collective call.

    Neither may a row see where those beside it stand: tables of positions that a library makes again for longer ones,
    as `dynamic` and `longrope` of https://huggingface.co/docs/transformers/main/internal/rope_utils, serve them all.
    """
    inputs, _ = dataset.test.__getitems__([0])
    if not isinstance(inputs, dict) or "document_ids" not in inputs:
        return
    from fsdp2_extra.models.causal import sees_documents, two_documents
    from fsdp2_extra.text.header_lines import longest

    length = 8 * config.tp * config.sp
    tokens = torch.arange(2 * length, device=device).repeat(3, 1) % 8
    tokens[2, :length] = tokens[0, :length].flip(0)
    seen = _differ(_logits(config, engine, two_documents(tokens, length), slice(length, None)))
    if any(gather(seen or _seen_by_a_copy(config, sees_documents))):
        raise ConfigError(
            f"--dataset {config.dataset} with --model {config.model}: a document sees those before it in the same "
            "sequence; use --documents together to train it so"
        )
    least, most = length, min(config.seq_len, longest(dataset))
    if most <= least or not _follows_positions(config, engine, tokens, length, most):
        return
    while most - least > 1:
        middle = (least + most) // 2
        follows = _follows_positions(config, engine, tokens, length, middle)
        least, most = (least, middle) if follows else (middle, most)
    raise ConfigError(
        f"--seq-len {config.seq_len} with --model {config.model}: beyond {least:,} positions it computes with a table "
        "of its microbatch's longest document, so a document's loss would depend on those beside it; use --seq-len "
        f"{least}, or for text --documents together, where all sequences have one length"
    )


def _follows_positions(config: Config, engine: Engine, tokens: Tensor, length: int, far: int) -> bool:
    """Return whether a second document's logits follow the positions of the first, of which the last is `far` - 1.

    Or a buffer does, which weights near 0 hide in the logits. A collective call.
    """
    from fsdp2_extra.models.causal import two_documents

    rows = two_documents(tokens, length)
    # Experts get other numbers of tokens of other positions, and round differently. So they do of other tokens.
    others = two_documents(tokens[[2, 2, 0]], length)
    moved = {**rows, "position_ids": rows["position_ids"].clone()}
    moved["position_ids"][:, :length] += far - length
    logits, buffers = [], []
    for one in (rows, others, moved):
        logits.append(_logits(config, engine, one, slice(length, None))[1])
        buffers.append([buffer.clone() for buffer in engine.model.buffers()])
    follow = any(_agree(*one[:2]) and not _agree(*one[1:]) for one in zip(*buffers, strict=True))
    return any(gather(follow or _differ(torch.stack(logits))))


def _agree(one: Tensor, other: Tensor) -> bool:
    """Return whether the values that both have are equal: a table that has only become longer changes none."""
    both = tuple(slice(min(sizes)) for sizes in zip(one.shape, other.shape, strict=False))
    return one.dim() == other.dim() and torch.equal(one[both], other[both])

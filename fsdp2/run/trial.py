"""What only a forward tells of a stranger's model, found out before the first step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fsdp2.config import Config
from fsdp2.data import Dataset
from fsdp2.data.loader import Batch, evaluation_batches
from fsdp2.models import ModelSpec
from fsdp2.options.errors import ConfigError
from fsdp2.parallel.compiling import uncompiled
from fsdp2.parallel.engine import Engine
from fsdp2.run.runtime import gather

# As many as are looked at, so that their whole logits take less than a step does: 33 MB of fp32 for 128,000 classes.
TOKENS = 64


@contextmanager
def whole_logits(engine: Engine, spec: ModelSpec) -> Iterator[ModelSpec]:
    """Let an engine give logits inside, also if its loss is made in chunks; the specification that knows them."""
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
        require_documents_apart(config, engine, dataset, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # no step has tensors of these sizes


def first_tokens(batch: Batch) -> Batch:
    """The first `TOKENS` of each sequence, each with something to predict."""
    inputs: Any = batch.inputs
    cut = {name: tensor[:, :TOKENS] for name, tensor in inputs.items()} if isinstance(inputs, dict) else None
    targets: Tensor = batch.targets[:, :TOKENS].clamp(min=0)  # class 0 where nothing is, as in a question of a chat
    return dataclasses.replace(batch, inputs=inputs[:, :TOKENS] if cut is None else cut, targets=targets)


def require_whole_loss(config: Config, engine: Engine, dataset: Dataset, device: torch.device) -> None:
    """Raise ConfigError if the loss in chunks isn't that of the logits: a model may scale them after its last layer."""
    spec = config.spec
    batch = first_tokens(next(evaluation_batches(dataset.test, 1, 0, 1, device)))
    with whole_logits(engine, spec) as plain:
        expected = plain.loss(engine.forward(batch), batch.targets)
    with engine.evaluating():
        found = spec.loss(engine.forward(batch), batch.targets)
    # The sum is rounded in another order. What a model does to its logits changes far more.
    if not all(gather(bool(torch.allclose(found.double(), expected.double(), rtol=1e-3)))):
        raise ConfigError(
            f"--chunked-loss with --model {config.model}: its loss would be {found.item():g} in place of "
            f"{expected.item():g}, since the model does something to its logits after its last layer; drop it"
        )


@torch.no_grad()
def require_documents_apart(config: Config, engine: Engine, dataset: Dataset, device: torch.device) -> None:
    """Raise ConfigError if the model lets a document see another in its row.

    Whether a stranger's model heeds `position_ids` or `document_ids` isn't told by its signature, so it is tried: the
    first of two documents is changed, and the second's logits have to stay as they are.
    """
    inputs, _ = dataset.test.__getitems__([0])
    if not isinstance(inputs, dict) or "document_ids" not in inputs:
        return
    tokens = torch.arange(16, device=device).unsqueeze(0) % 8
    row = torch.arange(8, device=device).repeat(2).unsqueeze(0)
    named = {"input_ids": tokens, "position_ids": row, "document_ids": row.new_tensor([[0] * 8 + [1] * 8])}
    changed = {**named, "input_ids": torch.cat([tokens[:, :8].flip(1), tokens[:, 8:]], dim=1)}
    with whole_logits(engine, config.spec) as plain:
        first, second = (
            plain.logits(engine.forward(Batch(one, tokens, True, 1, 16, True)))[:, 8:] for one in (named, changed)
        )
    if not all(gather(bool(torch.equal(first, second)))):
        raise ConfigError(
            f"--dataset {config.dataset} with --model {config.model}: a document sees those before it in the same "
            "sequence; use --documents together to train it so"
        )

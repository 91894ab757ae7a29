"""A loss in chunks is that of whole logits, which never exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2 import models
from fsdp2 import train as training
from fsdp2.config import Config
from fsdp2.data.loader import Batch
from fsdp2.models import llama
from fsdp2.models.initial import reset_parameters
from fsdp2.models.spec import ModelSpec, no_files
from fsdp2.options.errors import ConfigError
from fsdp2.run import first_forward
from fsdp2_extra.allocations.ledger import Ledger
from tests.harness import Ranks, losses, main_in_ranks, of_kind, refusal_in_ranks

Train = Callable[..., list[tuple[str, dict[str, Any]]]]

LLAMA = ["--model=llama", "--model-size=debug", "--dataset=random-tokens", "--seq-len=16", "--batch-size=4"]


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(one, Tensor):
                self.elements = max(self.elements, one.numel())
        return out


@pytest.mark.parametrize("name", ["llama", "transformer"])
def test_loss_gradients_and_right_answers_are_those_of_whole_logits(name: str) -> None:
    whole, parts = models.get(name), models.get(name, chunk_tokens=5)
    tokens = torch.randint(250, (3, 9), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, dims=1)
    targets[0, 4:] = -100
    results = []
    for spec in (whole, parts):
        model = spec.build("debug")
        reset_parameters(model, spec.initial_values, seed=1)
        outputs = spec.call(model, Batch(tokens, targets, True, 3, 22, True))
        loss, right = spec.scored(outputs, targets)
        spec.loss(outputs, targets).backward()
        results.append((loss, right, [parameter.grad for parameter in model.parameters()]))
    (loss, right, gradients), (loss_in_parts, right_in_parts, gradients_in_parts) = results
    # The same terms, added up in another order.
    assert torch.allclose(loss_in_parts, loss, rtol=1e-6)
    assert int(right_in_parts) == int(right)
    for one, other in zip(gradients, gradients_in_parts, strict=True):
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_the_logits_never_exist_as_a_whole() -> None:
    found = {}
    for chunk_tokens in (None, 4):
        spec = models.get("llama", chunk_tokens=chunk_tokens)
        model = spec.make(vocab_size=4096, dim=8, layers=1, heads=2, kv_heads=2, hidden=16)
        reset_parameters(model, spec.initial_values, seed=1)
        tokens = torch.arange(64).view(2, 32)
        with Largest() as largest:
            spec.loss(spec.call(model, Batch(tokens, tokens, True, 2, 64, True)), tokens).backward()
        found[chunk_tokens] = largest.elements
    assert found[None] >= 64 * 4096
    assert found[4] == 4096 * 8  # the embedding


@pytest.mark.losses_alone
@pytest.mark.parametrize(
    "way", [[], ["--mixed-precision"], ["--strategy=ddp"], ["--strategy=fsdp1"], ["--cpu-offload"]]
)
def test_a_run_has_the_losses_of_one_with_whole_logits(train: Train, way: list[str]) -> None:
    plain = train(*LLAMA, *way, run="plain", steps=3)
    parts = train(*LLAMA, *way, "--chunked-loss=24", run="parts", steps=3)
    # The sum of all terms is rounded in another order; in bf16 the gradients that are summed have three digits.
    tolerance = 1e-3 if way == ["--mixed-precision"] else 1e-6
    assert losses(parts) == pytest.approx(losses(plain), rel=tolerance)
    evaluated, whole = of_kind(parts, "eval")[-1], of_kind(plain, "eval")[-1]
    assert evaluated["accuracy"] == pytest.approx(whole["accuracy"], abs=2e-3)
    assert evaluated["count"] == whole["count"]


def scaled() -> ModelSpec:
    """A model that divides its logits, as some do whose scores would otherwise be large."""
    import dataclasses

    class Scaled(llama.Llama):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(*args, **kwargs) / 16

    return dataclasses.replace(llama.SPEC, make=Scaled)


def capped() -> ModelSpec:
    """A model whose cap no logit comes near, and no sum of 64 tokens' losses; that of a microbatch does."""
    import dataclasses

    class Capped(llama.Llama):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 10_000 * torch.tanh(super().forward(*args, **kwargs) / 10_000)

    return dataclasses.replace(llama.SPEC, make=Capped)


def biased() -> ModelSpec:
    """A model that adds a bias for each word, as BART does."""
    import dataclasses

    class Biased(llama.Llama):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            logits: Tensor = super().forward(*args, **kwargs)
            return logits + torch.ones(256)

    return dataclasses.replace(llama.SPEC, make=Biased)


def headless() -> ModelSpec:
    import dataclasses

    return dataclasses.replace(llama.SPEC, head=None)


def test_a_model_that_changes_its_logits_afterwards_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    flags = [*LLAMA, "--chunked-loss", f"--run-dir={tmp_path / 'run'}", "--threads=1", "--device=cpu"]
    for name, part in (
        ("scaled", "the model does something to its logits after its last layer, such as a cap; drop it"),
        ("capped", "the model does something to its logits after its last layer"),
        ("biased", "the model does something to its logits after its last layer"),
        ("headless", "--chunked-loss: the model doesn't tell which layer makes its logits"),
    ):
        for message in ranks.run(refusal_in_ranks, [*flags, f"--model=tests.test_chunked:{name}"]):
            assert part in message


def wide() -> ModelSpec:
    """A small model whose logits are the largest of all that it makes."""
    import dataclasses

    sizes = {"wide": {**llama.SIZES["debug"], "vocab_size": 8192}}
    return dataclasses.replace(llama.SPEC, sizes=sizes, files=no_files)


def _peaks(flags: list[str]) -> tuple[int, int]:
    """Bytes allocated at a time by the trial before the first step, and by that step."""
    peaks = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with Ledger() as ledger:
                result = function(*arguments, **named)
            peaks.append(ledger.peak_bytes)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_forward, "require_whole_loss", counted(first_forward.require_whole_loss))
        patch.setattr(training, "train_step", counted(training.train_step))
        main_in_ranks(flags)
    return peaks[0], peaks[1]


def test_the_trial_of_the_whole_loss_takes_less_than_a_step(ranks: Ranks, tmp_path: Path) -> None:
    flags = ["--model=tests.test_chunked:wide", "--dataset=random-tokens", "--seq-len=512", "--batch-size=1"]
    flags += ["--chunked-loss=64", "--max-steps=1", "--threads=1", "--device=cpu", "--no-save-model"]
    ((tried, step),) = ranks.run(_peaks, [*flags, f"--run-dir={tmp_path / 'run'}", "--checkpoint-every=9"], ranks=1)
    assert tried < step
    assert tried > 2 * 64 * 8192 * 4  # the whole logits of 64 tokens and their logarithms were there


def test_a_question_without_targets_is_tried_as_well() -> None:
    tokens = torch.arange(200).view(1, 200)
    named = {"input_ids": tokens, "position_ids": tokens}
    batch = first_forward.first_tokens(Config(), Batch(named, torch.full_like(tokens, -100), True, 1, 200, True))
    assert batch.targets.tolist() == [[0] * first_forward.TOKENS]
    assert {name: tensor.shape for name, tensor in batch.inputs.items()} == dict.fromkeys(
        named, (1, first_forward.TOKENS)
    )


def test_images_have_no_chunks() -> None:
    with pytest.raises(ConfigError, match="--chunked-loss with --model vit"):
        Config(chunked_loss=8)
    assert isinstance(models.get("vit").build("tiny"), nn.Module)

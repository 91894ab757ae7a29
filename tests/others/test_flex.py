"""FlexAttention in models of transformers: documents of a row stay apart, as by a mask for each pair of tokens.

torch has no FlexAttention that trains on a CPU; uncompiled, as here, it computes scores and their gradients as other
operators do. What only a GPU shows is in `tests/gpu/test_attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2 import models
from fsdp2.models import attention
from fsdp2.options import strategies
from fsdp2_extra.models import attending
from tests.harness import Ranks, forget_models, losses, main_in_ranks
from tests.others.common import LLAMA, MODELS, TEXT, save

transformers = pytest.importorskip("transformers")

GROUPED = {**TEXT, **LLAMA, "num_key_value_heads": 2}
WAYS = ("auto", "flex")
CASES = {
    "llama": MODELS["llama"],
    "mixtral": MODELS["mixtral"],
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**TEXT, **LLAMA}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": 16}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
    "gemma2": (  # every other layer sees a window; scores are capped
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**GROUPED, "head_dim": 16, "sliding_window": 16, "attn_logit_softcapping": 5.0},
    ),
}


@contextmanager
def _flex_here() -> Iterator[list[int]]:
    """FlexAttention on the CPU, as torch computes it without a compiler; how often it is called."""
    from torch.nn.attention import flex_attention as torchs
    from transformers import masking_utils
    from transformers.integrations import flex_attention as theirs

    calls: list[int] = []

    def counted(*arguments: Any, training: bool, **named: Any) -> Any:
        calls.append(1)
        return torchs.flex_attention(*arguments, **named)

    def plain(**named: Any) -> Any:
        return torchs.create_block_mask(**{**named, "_compile": False})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchs, "_validate_device", lambda *tensors: None)
        patch.setattr(theirs, "compile_friendly_flex_attention", counted)
        patch.setattr(masking_utils, "create_block_mask", plain)
        patch.setattr(attending, "way", lambda *arguments, **named: "flex")
        patch.setattr(attention, "missing", lambda: None)
        patch.setattr(strategies, "attention_refusals", lambda *arguments: [])
        yield calls
    torch._dynamo.reset()


def _documents(*ends: int, length: int = 24) -> tuple[Tensor, Tensor]:
    """Numbers of documents and places in them, (2, length) each; of the second row, one document."""
    ids, places = torch.zeros(2, length, dtype=torch.int64), torch.arange(length).repeat(2, 1)
    for end in ends:
        ids[0, end:] += 1
        places[0, end:] = torch.arange(length - end)
    return ids, places


def _trained(name: str, way: str, ends: tuple[int, ...]) -> list[Tensor]:
    spec = models.get(name, attention=way)
    model = spec.build("own")
    assert spec.load is not None
    assert spec.weights is not None
    model.load_state_dict(spec.load(spec.weights)[0])
    ids, places = _documents(*ends)
    tokens = torch.randint(256, ids.shape, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, "position_ids": places, "document_ids": ids}
    model.train()
    logits = spec.logits(spec.call(model, SimpleNamespace(inputs=inputs, targets=tokens)))
    logits.float().square().mean().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", CASES)
def test_flex_is_the_mask_for_each_pair(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, name, CASES[name])
    place = save(name, tmp_path)
    forget_models()
    assert "flex" in models.get(place).attentions
    with _flex_here() as calls:
        by_mask, by_flex = _trained(place, "auto", (5, 11)), _trained(place, "flex", (5, 11))
        together = _trained(place, "flex", ())
    assert len(calls) == 2 * 2  # one of each layer
    assert len(by_mask) == len(by_flex)
    for one, other in zip(by_mask, by_flex, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)  # sums in another order, in fp32
    assert not torch.allclose(together[0][0], by_flex[0][0], atol=1e-3)  # the documents do matter


def _runs(flags: list[str], folder: str) -> list[list[float]]:
    with _flex_here() as calls:
        found = [losses(main_in_ranks([*flags, f"--attention={way}", f"--run-dir={folder}/{way}"])) for way in WAYS]
    assert calls
    return found


@pytest.mark.losses_alone
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("more", [["--activation-checkpointing=block"], ["--lora=4", "--strategy=ddp"]])
def test_a_sharded_model_trains_by_flex_as_by_a_mask(ranks: Ranks, tmp_path: Path, more: list[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A first text.\n\nAnother one, which is longer than the first.\n" * 40)
    flags = [f"--model={save('llama', tmp_path / 'model')}", f"--dataset=text:{text}", "--seq-len=32", "--bos=never"]
    flags += ["--batch-size=4", "--max-steps=3", "--tokenizer=bytes", "--threads=1", "--device=cpu", *more]
    by_mask, by_flex = ranks.run(_runs, flags, str(tmp_path), ranks=2)[0]
    assert by_flex == pytest.approx(by_mask, rel=1e-5)  # sums in another order, in fp32
    assert len(set(by_mask)) == 3


def test_a_run_on_a_gpu_that_is_asked_on_a_cpu_attends_by_torchs_function(tmp_path: Path) -> None:
    spec = models.get(save("llama", tmp_path), attention="flex")
    model, tokens = spec.build("own"), torch.zeros(1, 8, dtype=torch.int64)
    spec.call(model, SimpleNamespace(inputs=tokens, targets=tokens))
    assert model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


def test_a_model_that_drops_scores_in_training_has_no_flex(tmp_path: Path) -> None:
    assert "flex" not in models.get(save("llama", tmp_path, attention_dropout=0.1)).attentions

"""Our Llama: its numbers are those that were published, and its logits those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp2 import models
from fsdp2.models import llama
from fsdp2.models.initial import reset_parameters
from fsdp2_tools.checkpoint.__main__ import main as checkpoint_command
from tests.harness import Ranks, losses, main_in_ranks

# Of Llama 3.2 1B and Llama 3.1, by their model cards' safetensors.
PUBLISHED = {"1b": 1_235_814_400, "8b": 8_030_261_248, "70b": 70_553_706_496, "405b": 405_853_388_800}


@pytest.mark.parametrize("size", PUBLISHED)
def test_sizes_are_those_that_were_published(size: str) -> None:
    model = llama.SPEC.on_meta(size)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[size]


TINY = {"vocab_size": 64, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48}


@pytest.mark.parametrize("more", [{}, {"tied": True}, {"rope_theta": 500_000.0, "rope_factor": 8.0}, {"kv_heads": 4}])
def test_logits_are_those_of_transformers(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setitem(llama.SIZES, "here", TINY | more)
    ours = llama.SPEC.build("here")
    reset_parameters(ours, llama.INITIAL_VALUES, seed=1)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**json.loads(llama.files("here")["config.json"])))
    theirs.load_state_dict(ours.state_dict())  # the same names
    tokens = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # Both round to fp32 in other places, since transformers multiplies by the frequencies in a matrix product.
        assert torch.allclose(ours(tokens), theirs.eval()(input_ids=tokens).logits, rtol=1e-5, atol=1e-5)


def test_far_positions_turn_as_transformers_turns_them() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**json.loads(llama.files("8b")["config.json"]))
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    assert torch.equal(llama.frequencies(128, 500_000.0, 8.0, torch.device("cpu")), rotary.inv_freq)


def test_a_document_sees_nothing_of_another_in_its_row() -> None:
    model = llama.SPEC.make(**TINY)
    reset_parameters(model, llama.INITIAL_VALUES, seed=1)
    tokens = torch.randint(64, (1, 12), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    with torch.no_grad():
        before = model(tokens, positions, documents)
        tokens[0, 2] += 1 if tokens[0, 2] < 63 else -1
        after = model(tokens, positions, documents)
        alone = model(tokens[:, 5:])
    assert torch.equal(before[0, 5:], after[0, 5:])
    assert torch.equal(before[0, :2], after[0, :2])  # nor what comes later
    assert not torch.equal(before[0, 2:5], after[0, 2:5])
    # As if it were alone in its row, but for the kernel, which takes a mask here.
    assert torch.allclose(alone[0], after[0, 5:], rtol=0, atol=1e-6)


FLAGS = [
    "--model=llama",
    "--dataset=random-tokens",
    "--seq-len=16",
    "--batch-size=4",
    "--test-batch-size=64",
    "--max-steps=3",
    "--threads=1",
    "--device=cpu",
]


def _strategies(folder: str) -> list[list[float]]:
    ways = [[], ["--strategy=ddp"], ["--strategy=fsdp1"], ["--activation-checkpointing"]]
    return [losses(main_in_ranks([*FLAGS, f"--run-dir={folder}/{i}", *way])) for i, way in enumerate(ways)]


def test_it_trains_and_goes_to_transformers(ranks: Ranks, tmp_path: Path) -> None:
    first, *others = ranks.run(_strategies, str(tmp_path))[0]
    assert len(first) == 3
    assert all(other == first for other in others)
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "hf"
    assert checkpoint_command(["export", str(tmp_path / "0"), str(out), "--format", "hf"]) == 0
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    ours: nn.Module = models.get("llama").build("debug")
    ours.load_state_dict(torch.load(tmp_path / "0" / "full_model" / "full-model.pt", weights_only=True))
    for name, tensor in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor)

"""The recipes of configs/ that start from weights, each run in small, and on the page with its planned memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2.config import parse
from tests.docs.recipes import BEGIN, PAGE, RANKS, RECIPES, ROOT
from tests.harness import of_kind

Train = Callable[..., list[tuple[str, dict[str, Any]]]]
SMALL_LLAMA = ("--model=llama", "--model-size=debug", "--seq-len=32")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_from_weights(train: Train, tmp_path: Path, name: str) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("To be, or not to be: that is the question. " * 200)
    train(*SMALL_LLAMA, "--dataset=random-tokens", run="first", steps=1)
    weights = f"--init-from={tmp_path / 'first' / 'full_model' / 'full-model.pt'}"
    recipe, text = f"--config={ROOT / 'configs' / f'{name}.toml'}", f"--dataset=text:{tmp_path / 'notes'}"
    events = train(recipe, *SMALL_LLAMA, text, weights, "--grad-accumulation=2", run="tuned", steps=4)
    (start,) = of_kind(events, "start")
    config = parse([recipe, *SMALL_LLAMA, text, weights])
    passes = f"{config.epochs} epoch{'s' * (config.epochs > 1)} (4 steps at most)"
    assert f"from weights: {passes}, adamw, lr {config.lr:g}, cosine" in "\n".join(start["header"])
    assert len(of_kind(events, "train")) == 4
    assert of_kind(events, "end")[0]["reason"] == "finished"


def test_each_recipe_is_on_the_page_with_its_memory() -> None:
    table = PAGE.read_text().partition(BEGIN)[2]
    for name in RECIPES:
        (row,) = re.findall(rf"^\| `configs/{name}\.toml` \|.*$", table, re.MULTILINE)
        assert len(re.findall(r" [\d.]+ GB ", row)) == len(RANKS)


@pytest.mark.parametrize("name", ["finetune-full", "finetune-lora"])
def test_a_fine_tuning_has_sequences_of_as_many_tokens_as_positions(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    transformers.LlamaConfig(vocab_size=300, max_position_embeddings=64, **sizes).save_pretrained(tmp_path)
    recipe = [f"--config={ROOT / 'configs' / f'{name}.toml'}", f"--model=hf:{tmp_path}", "--init-from=a"]
    assert parse([*recipe, "--dataset=source-text"]).seq_len == 64

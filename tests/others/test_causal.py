"""Causal or not, documents apart or not: told by what a changed token does to the logits of others."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.train import main
from fsdp2_extra.models.causal import same
from tests.harness import Ranks, forget_models, losses, main_in_ranks
from tests.others.common import MODELS, WORDS, flags

SMALL = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
PYTHIA = {**SMALL, "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "intermediate_size": 64}
XLNET = {"architectures": ["XLNetLMHeadModel"], "model_type": "xlnet", "vocab_size": 300, "d_model": 32, "n_layer": 2}
XLNET |= {"n_head": 4, "d_inner": 64, "dropout": 0.0}
OPT = {**SMALL, "architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32}
OPT |= {"max_position_embeddings": 64, "dropout": 0.0}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    pytest.importorskip("transformers")
    forget_models()


def trained(folder: Path, config: dict[str, Any], *more: str) -> list[float]:
    """The losses of two steps of a model whose folder has a configuration alone."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    line = flags(f"hf:{folder}", folder / "run", *more, "--strategy=none", "--init-from=scratch", "--max-steps=2")
    events: list[Any] = []
    main(parse([*line, "--no-save-model"]), lambda kind, data: events.append((kind, data)))
    return losses(events)


def words(folder: Path) -> str:
    """A text of short documents, as a flag."""
    (folder / "text").mkdir()
    for i in range(8):
        (folder / "text" / f"{i}.txt").write_text("A short document. " * (1 + i % 3))
    return f"--dataset=text:{folder / 'text'}"


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_causal_model_whose_configuration_says_that_it_is_no_decoder_trains(tmp_path: Path, layers: int) -> None:
    config = {**PYTHIA, "num_hidden_layers": layers, "is_decoder": False}
    assert len(trained(tmp_path / "model", config, *WORDS)) == 2


@pytest.mark.parametrize("layers", [1, 3])
def test_an_encoder_is_refused_with_what_to_set_however_deep_it_is(tmp_path: Path, layers: int) -> None:
    config = {**SMALL, "num_hidden_layers": layers, "intermediate_size": 64, "model_type": "roberta"}
    with pytest.raises(ConfigError, match="sees the tokens that it is to predict unless is_decoder is true; set it"):
        trained(tmp_path / "model", {**config, "architectures": ["RobertaForCausalLM"]}, *WORDS)
    config |= {"is_decoder": True, "architectures": ["RobertaForCausalLM"]}
    forget_models()
    assert len(trained(tmp_path / "other", config, *WORDS)) == 2


def test_a_model_that_sees_what_it_is_to_predict_is_refused_whatever_it_says_of_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it sees the tokens that it is to predict, since a later token changes"):
        trained(tmp_path / "model", XLNET, *WORDS)


def test_weights_that_are_nan_tell_nothing_of_what_a_model_sees(tmp_path: Path) -> None:
    """A run goes on with them where --on-nonfinite lets it, as other models' do."""
    diverges = [words(tmp_path), "--optimizer=sgd", "--lr=1000", "--clip-grad-norm=off", "--schedule=constant"]
    diverges += ["--warmup-steps=0", "--on-nonfinite=continue", "--checkpoint-every=1", "--chunked-loss=16"]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(PYTHIA))
    line = flags(f"hf:{tmp_path / 'model'}", tmp_path / "run", *diverges, "--strategy=none", "--init-from=scratch")
    for steps in (6, 7):
        assert math.isnan(losses(main_in_ranks([*line, "--no-save-model", f"--max-steps={steps}"]))[-1])


def test_experts_that_round_differently_see_no_other_document(tmp_path: Path) -> None:
    _, name, numbers = MODELS["mixtral"]
    config = {**numbers, "vocab_size": 300, "architectures": [name], "model_type": "mixtral"}
    assert len(trained(tmp_path / "model", config, words(tmp_path))) == 2


def test_a_model_whose_documents_see_each_other_is_refused(tmp_path: Path) -> None:
    text = words(tmp_path)
    with pytest.raises(ConfigError, match="a document sees those before it in the same sequence"):
        trained(tmp_path / "model", OPT, text)
    forget_models()
    assert len(trained(tmp_path / "other", OPT, text, "--documents=together")) == 2


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("sees_later_behind_a_head", "it sees the tokens that it is to predict"),
        ("sees_later_behind_a_projection", "it sees the tokens that it is to predict"),
        ("sees_documents_behind_a_head", "a document sees those before it"),
    ],
)
def test_a_layer_that_begins_with_zeros_hides_nothing(tmp_path: Path, name: str, why: str) -> None:
    line = flags(f"tests.others.own:{name}", tmp_path / "run", words(tmp_path), "--strategy=none", "--max-steps=1")
    with pytest.raises(ConfigError, match=why):
        main(parse([*line, "--no-save-model"]))
    if name.startswith("sees_documents"):
        main(parse([*line, "--no-save-model", "--documents=together"]))


def test_rounding_is_told_from_what_a_row_sees() -> None:
    row = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    assert same(torch.stack([row, row, row * (1 + 2**-22)]))
    assert not same(torch.stack([row, row, row + 1e-4]))
    assert not same(torch.stack([row, row, row * float("nan")]))
    assert same(torch.zeros(3, 8))
    # In bf16 sums in another order differ by more than that, also where the inputs were equal.
    assert same(torch.stack([row, row + 4e-3, row - 4e-3]))
    assert not same(torch.stack([row, row + 4e-3, row + 0.1]))


LLAMA = {**SMALL, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 64}
LLAMA |= {"max_position_embeddings": 12}
PHI = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "max_position_embeddings": 512}
PHI |= {"original_max_position_embeddings": 12, "pad_token_id": 0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 8.0, 16.0], "rope_theta": 1e4}
TABLES = {  # that transformers makes by the largest position of a forward
    "dynamic": {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    "dynamic, as published": {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "longrope": {**PHI, "rope_parameters": {**LONG, "original_max_position_embeddings": 12}},
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_follows_other_documents_is_refused(tmp_path: Path, name: str) -> None:
    """With the weights of a beginning, which are near 0: the logits differ by less than they are rounded by."""
    text = words(tmp_path)
    with pytest.raises(
        ConfigError, match=r"beyond 12 positions .*; use --seq-len 12, or for text --documents together"
    ):
        trained(tmp_path / "model", TABLES[name], text)
    forget_models()
    assert len(trained(tmp_path / "short", TABLES[name], text, "--seq-len=12")) == 2
    forget_models()
    assert len(trained(tmp_path / "together", TABLES[name], text, "--documents=together")) == 2


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_documents_together_resume_and_evaluate_with_one_table(tmp_path: Path, name: str, ranks: Ranks) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TABLES[name], "initializer_range": 0.4}))
    line = [words(tmp_path), "--documents=together", "--init-from=scratch", "--no-save-model", "--checkpoint-every=2"]

    def run(to: str, *more: str) -> list[float]:
        return losses(ranks.run(main_in_ranks, flags(f"hf:{folder}", tmp_path / to, *line, *more))[0])

    whole = run("whole", "--max-steps=4")
    assert run("half", "--max-steps=2") + run("half", "--max-steps=4", "--resume=auto") == whole
    assert run("evaluated", "--max-steps=4", "--eval-every=1") == whole


def test_a_table_that_no_document_reaches_is_no_reason(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for i in range(200):
        (tmp_path / "text" / f"{i}.txt").write_text(f"no {i} is")
    assert len(trained(tmp_path / "model", TABLES["dynamic"], f"--dataset=text:{tmp_path / 'text'}")) == 2


def test_a_table_that_becomes_longer_is_no_reason(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A document of more tokens than any trial has. " * 60)
    line = ["--strategy=none", "--max-steps=1", "--seq-len=128", f"--dataset=text:{tmp_path / 'a.txt'}"]
    main(parse([*flags("tests.others.own:growing", tmp_path / "run", *line), "--no-save-model"]))

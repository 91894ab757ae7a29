"""A model and the tokenizer of its text: neither bytes nor an ordinary token take a place in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import check_data
from tests.harness import forget_models
from tests.others.common import MODELS

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")


def _model(folder: Path, name: str) -> str:
    """A folder with a configuration alone."""
    forget_models()
    _, architecture, numbers = MODELS[name]
    folder.mkdir()
    content = {**numbers, "vocab_size": 300, "model_type": name, "architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(content))
    return f"--model=hf:{folder}"


def _tokenizer(folder: Path, count: int) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["w4"])
    made.save(str(folder / "tokenizer.json"))


def _check(tmp_path: Path, *flags: str) -> None:
    text = tmp_path / "a.txt"
    text.write_text("w1 w2 w3 " * 400)
    check_data(parse([f"--dataset=text:{text}", "--seq-len=8", *flags]))


@pytest.mark.parametrize("name", ["vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tokenizer_config.json"])
def test_bytes_dont_take_the_place_of_a_tokenizer_in_another_form(tmp_path: Path, name: str) -> None:
    model = _model(tmp_path / "model", "gpt2")
    _check(tmp_path, model)  # a model without one is trained on bytes
    (tmp_path / "model" / name).write_text("{}")
    forget_models()
    with pytest.raises(ConfigError, match=rf"its tokenizer is in {name}, and only a tokenizer\.json is read"):
        _check(tmp_path, model)
    _check(tmp_path, model, "--tokenizer=bytes")


def test_no_word_of_the_text_hides_others(tmp_path: Path) -> None:
    model = _model(tmp_path / "model", "bert")
    (tmp_path / "tok").mkdir()
    _tokenizer(tmp_path / "tok", 300)
    with pytest.raises(ConfigError, match="hides tokens behind token 299, which is 'w299' there; give"):
        _check(tmp_path, model, f"--tokenizer={tmp_path / 'tok'}")
    # Where the last token of the vocabulary is none of the text's it hides others, as it does of bytes.
    _tokenizer(tmp_path / "tok", 200)
    _check(tmp_path, model, f"--tokenizer={tmp_path / 'tok'}")
    _check(tmp_path, model)

"""Weights of other programs, damaged: they are refused in one line, or load as what they were. Never as others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from fsdp2.checkpoint.refusal import Refused, refusal
from fsdp2.checkpoint.sources.safetensors_files import INDEX
from fsdp2.checkpoint.weights import load_weights
from fsdp2.config import parse
from fsdp2.models.initial import slices_of
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from tests.fuzz.common import one_line, refused, trials
from tests.fuzz.damage import changed, damaged
from tests.harness import forget_models

State = dict[str, Tensor]

# Two of one shape, one in two bytes, one without dimensions and one without elements.
STATE: State = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.arange(12, 24, dtype=torch.float32).reshape(3, 4),
    "b.bias": torch.arange(5, dtype=torch.bfloat16),
    "scale": torch.tensor(2.5),
    "count": torch.tensor(7),
    "none": torch.empty(0, 4),
}
WHOLE = save_bytes(STATE)
HEADER = 8 + int.from_bytes(WHOLE[:8], "little")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, _group: None) -> Path:
    return tmp_path_factory.mktemp("weights")


def loaded(place: Path) -> State | None:
    """What a model gets of a place, by the way that each rank reads it; None if it is refused in one line."""
    targets = {name: torch.full_like(tensor, 99) for name, tensor in STATE.items()}
    try:
        load_weights(str(place), targets, slices_of, partial=False)
    except Refused as error:
        one_line(refusal(str(error)))
        return None
    return targets


def equal(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@given(content=damaged(WHOLE))
@trials(200)
def test_safetensors(folder: Path, content: bytes) -> None:
    file = folder / "one.safetensors"
    file.write_bytes(content)
    found = loaded(file)
    if found is not None:
        # Nothing but a number of a tensor can have changed, of which a file keeps no hash.
        assert len(content) == len(WHOLE)
        assert equal(found, load_bytes(content))
        assert content[HEADER:] != WHOLE[HEADER:] or equal(found, STATE)


@given(header=changed(json.loads(WHOLE[8:HEADER])), pad=st.booleans())
@trials(200)
def test_a_header(folder: Path, header: Any, pad: bool) -> None:
    text = json.dumps(header).encode() + b" " * (7 if pad else 0)
    file = folder / "header.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + WHOLE[HEADER:])
    found = loaded(file)
    assert found is None or equal(found, STATE)


@pytest.fixture(scope="module")
def parts(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A folder with two files, and their index."""
    place = folder / "parts"
    place.mkdir()
    names = list(STATE)
    files = {f"model-{number + 1:05d}-of-00002.safetensors": names[number::2] for number in range(2)}
    for file, some in files.items():
        (place / file).write_bytes(save_bytes({name: STATE[name] for name in some}))
    (folder / "outside.safetensors").write_bytes(WHOLE)
    index = {"metadata": {"total_size": 1}, "weight_map": {name: file for file, some in files.items() for name in some}}
    (place / INDEX).write_text(json.dumps(index))
    found = loaded(place)
    assert found is not None
    assert equal(found, STATE)
    return place, index


@st.composite
def indices(draw: st.DrawFn) -> bytes:
    names = {name: f"model-{at % 2 + 1:05d}-of-00002.safetensors" for at, name in enumerate(STATE)}
    index = {"metadata": {"total_size": 1}, "weight_map": names}
    if draw(st.booleans()):
        return draw(damaged(json.dumps(index).encode()))
    return json.dumps(draw(changed(index))).encode()


@given(content=indices())
@trials(200)
def test_an_index(parts: tuple[Path, dict[str, Any]], content: bytes) -> None:
    place, _ = parts
    (place / INDEX).write_bytes(content)
    found = loaded(place)
    assert found is None or equal(found, STATE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, _group: None) -> Iterator[Path]:
    """A folder with the smallest model of transformers."""
    pytest.importorskip("transformers")
    from tests.others.common import save

    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    place = tmp_path_factory.mktemp("model")
    save("llama", place)
    whole = json.loads((place / "config.json").read_text())
    (place / "whole.json").write_text(json.dumps({key: value for key, value in whole.items() if key in KEYS}))
    yield place
    forget_models()
    del os.environ["HF_HUB_OFFLINE"]
    if before is not None:
        os.environ["HF_HUB_OFFLINE"] = before


KEYS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "hidden_act"),
    *("model_type", "architectures", "rope_parameters", "tie_word_embeddings", "rms_norm_eps", "dtype", "pad_token_id"),
    *("num_hidden_layers", "max_position_embeddings", "initializer_range", "attention_bias", "head_dim"),
)


@given(data=st.data())
@trials(40)
def test_a_configuration(model: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole: dict[str, Any] = json.loads((model / "whole.json").read_text())
    if data.draw(st.booleans()):
        content = data.draw(damaged(json.dumps(whole).encode()))
    else:
        content = json.dumps(data.draw(changed(whole))).encode()
    if _is_endless(content):
        return
    (model / "config.json").write_bytes(content)
    forget_models()
    run = tmp_path_factory.getbasetemp() / "never"
    line = [f"--model=hf:{model}", "--dataset=random-tokens", f"--run-dir={run}", "--seq-len=16", "--device=cpu"]
    job = refused(lambda: preflight(parse(line), World(0, 1, 0, 1)), ConfigError)
    if job is not None:
        with job.hold:
            pass


def _is_endless(content: bytes) -> bool:
    """Whether it asks for so many layers that making them without memory takes minutes: it does what it says."""
    try:
        count = json.loads(content)["num_hidden_layers"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return False
    return isinstance(count, (int, float)) and count > 50

"""export --format hf: what config.json says of the weights is true of them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp2 import models
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.sources.opening import FOREIGN
from fsdp2.checkpoint.store import fingerprint, write_marker
from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from fsdp2_tools.checkpoint.hf_folder import dtype_of
from tests.commands.common import Cli
from tests.harness import forget_models, same

transformers = pytest.importorskip("transformers", reason="needs the extra hf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in bf16 of a model whose head is its embedding."""
    numbers = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(1)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**numbers, **heads, tie_word_embeddings=True))
    place = tmp_path_factory.mktemp("hf") / "bf16"
    model.to(torch.bfloat16).save_pretrained(place)
    return place


@pytest.fixture
def weights(folder: Path, tmp_path: Path) -> Path:
    """The weights that a run which began with the folder has in fp32, with the files that it keeps."""
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_bytes((folder / "config.json").read_bytes())
    model = transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    place = tmp_path / "run" / "weights.pt"
    torch.save({name: tensor * 1.001 for name, tensor in model.state_dict().items()}, place)
    return place


def _config(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "config.json").read_bytes())
    return found


def test_of_two_sets_of_weights_it_is_that_which_transformers_loads(folder: Path, tmp_path: Path, cli: Cli) -> None:
    both = tmp_path / "both"
    shutil.copytree(folder, both)
    other = {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(other, both / "model-00001-of-00001.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}
    (both / "model.safetensors.index.json").write_text(json.dumps(index))
    theirs = transformers.Qwen2ForCausalLM.from_pretrained(both, dtype=torch.bfloat16).state_dict()
    cli("export", both, tmp_path / "ours.pt", "--format=pt")
    ours = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert same(ours, {name: theirs[name] for name in ours})


def _changed(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("beside", ["model.fp16.safetensors", "consolidated.safetensors", "Model.safetensors"])
def test_weights_under_a_name_that_transformers_does_not_read_are_passed_over(
    beside: str, folder: Path, tmp_path: Path, cli: Cli
) -> None:
    both = tmp_path / "both"
    both.mkdir()
    shutil.copy(folder / "config.json", both)
    torch.save(load_file(folder / "model.safetensors"), both / "pytorch_model.bin")
    save_file(_changed(folder), both / beside, {"format": "pt"})
    cli("export", both, tmp_path / "ours.pt", "--format=pt")
    assert same(torch.load(tmp_path / "ours.pt", weights_only=True), load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_adapters_beside_the_weights_are_refused(ending: str, folder: Path, tmp_path: Path, cli: Cli) -> None:
    """transformers loads them with the model, where they change what it computes."""
    both = tmp_path / "both"
    shutil.copytree(folder, both)
    (both / f"adapter_model.{ending}").touch()
    refused = f"{both}/adapter_model.{ending}: adapters aren't loaded; merge them into their model with peft, or move"
    for line in (["import", both, tmp_path / "imported"], ["export", both, tmp_path / "ours.pt", "--format=pt"]):
        assert refused in cli(*line)[2]
    config = parse(
        [f"--model=hf:{folder}", f"--init-from={both}", f"--run-dir={tmp_path / 'run'}", "--dataset=random-tokens"]
    )
    with pytest.raises(ConfigError, match=r"adapters aren't loaded"):
        preflight(config, World(0, 1, 0, 1))


@pytest.mark.parametrize("marker", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_a_model_with_a_checkpoint_in_its_folder_is_refused(
    inside: bool, marker: bool, folder: Path, tmp_path: Path, cli: Cli
) -> None:
    """A checkpoint's weights would be taken for the model's, which no other program sees."""
    both, step = tmp_path / "both", tmp_path / "checkpoints" / "step-00000000"
    shutil.copytree(folder, both)
    save_file(_changed(folder), tmp_path / "other.safetensors", {"format": "pt"})
    step.parent.mkdir()
    assert cli("import", tmp_path / "other.safetensors", step)[0] == 0
    if not marker:
        (step / "COMMIT.json").unlink()
    if inside:
        shutil.copytree(tmp_path / "checkpoints", both / "checkpoints")
    else:
        shutil.copytree(step, both, dirs_exist_ok=True)
    line = ["export", both, tmp_path / "ours.pt", "--format=pt"]
    if inside and not marker:  # no reader takes a save that wasn't committed
        assert cli(*line)[0] == 0
        assert same(torch.load(tmp_path / "ours.pt", weights_only=True), load_file(folder / "model.safetensors"))
        return
    other = "checkpoints/ with 1 steps" if inside else ".metadata"
    refused = f"{both}: holds model.safetensors, and a checkpoint too ({other}); move one of them to another folder"
    assert refused in cli(*line)[2]
    with pytest.raises(ConfigError, match="and a checkpoint too"):
        preflight(
            parse([f"--model=hf:{both}", f"--run-dir={tmp_path / 'new'}", "--dataset=random-tokens"]), World(0, 1, 0, 1)
        )


def test_weights_that_a_marker_does_not_list_are_refused(folder: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "full_model"
    assert cli("export", folder, out, "--format=safetensors", "--max-shard-size=1kB")[0] == 0
    files = {name: fingerprint(LocalFiles(out), name) for name in os.listdir(out)}
    write_marker(LocalFiles(out), {"step": 1, "world_size": 1, "files": files})
    assert cli("export", out, tmp_path / "a.pt", "--format=pt")[0] == 0
    save_file(_changed(folder), out / "model.safetensors", {"format": "pt"})
    refused = f"{out}: holds model.safetensors, which its COMMIT.json doesn't list; move that file away"
    assert refused in cli("export", out, tmp_path / "b.pt", "--format=pt")[2]


def test_a_configuration_that_names_its_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "named"
    shutil.copytree(folder, place)
    config = json.loads((place / "config.json").read_bytes())
    (place / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    with pytest.raises(ConfigError, match=r"transformers_weights names other\.safetensors, and only "):
        parse([f"--model=hf:{place}"])


def test_the_dtype_is_the_source_folders_unless_another_is_asked_for(
    folder: Path, weights: Path, tmp_path: Path, cli: Cli
) -> None:
    original, trained = load_file(folder / "model.safetensors"), torch.load(weights, weights_only=True)
    for flags, dtype, said in (
        ([], torch.bfloat16, "bfloat16 as in the model's config.json (--dtype chooses another); the source"),
        (["--dtype=fp32"], torch.float32, "float32; the source"),
        (["--dtype=fp16"], torch.float16, "float16; the source"),
    ):
        out = tmp_path / str(dtype)
        line = cli("export", weights, out, "--format=hf", *flags)[1]
        size = sum(tensor.numel() for tensor in original.values()) * dtype.itemsize
        assert f"{len(original)} tensors, {size:,} bytes, {said}" in line
        config, state = _config(out), load_file(out / "model.safetensors")
        assert config["dtype"] == str(dtype).removeprefix("torch.")
        assert config["tie_word_embeddings"] is True
        assert same(state, {name: trained[name].to(dtype) for name in original})
        assert config["vocab_size"] == len(state["model.embed_tokens.weight"])
        model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
        assert {tensor.dtype for tensor in model.parameters()} == {dtype}
        assert same(dict(model.state_dict()), {name: tensor.to(dtype) for name, tensor in trained.items()})


def test_an_export_has_no_bar_of_transformers(weights: Path, tmp_path: Path, cli: Cli) -> None:
    from transformers.utils import logging as words

    words.enable_progress_bar()
    status, *printed = cli("export", weights, tmp_path / "out", "--format=hf")
    assert status == 0
    assert "shards" not in "".join(printed)
    assert words.is_progress_bar_enabled(), "what comes after has them"


def test_how_a_model_writes_is_what_its_folder_says(weights: Path, tmp_path: Path, cli: Cli) -> None:
    """An instruction model names the ends of its answers there alone: without them it doesn't stop."""
    says = b'{"eos_token_id": [2, 9], "do_sample": true, "temperature": 0.6, "top_p": 0.9}'
    (weights.parent / "model" / "generation_config.json").write_bytes(says)
    assert cli("export", weights, tmp_path / "out", "--format=hf")[0] == 0
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == says
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert (found.eos_token_id, found.temperature) == ([2, 9], 0.6)


def test_what_a_forward_returns_is_no_matter_of_a_folder(weights: Path, tmp_path: Path, cli: Cli) -> None:
    """Training takes logits by their name, whatever more a folder asks for; its export says what the folder said."""
    model = weights.parent / "model"
    says = {"output_attentions": True, "output_hidden_states": True, "return_dict": False, "use_cache": True}
    (model / "config.json").write_text(json.dumps({**json.loads((model / "config.json").read_bytes()), **says}))
    spec = models.get(f"hf:{model}")
    tokens = torch.ones(1, 4, dtype=torch.int64)
    outputs = spec.call(spec.build("own"), SimpleNamespace(inputs=tokens, targets=tokens))
    assert spec.logits(outputs).shape == (1, 4, 64)
    assert outputs.keys() == {"logits"}
    assert cli("export", weights, tmp_path / "out", "--format=hf")[0] == 0
    assert _config(tmp_path / "out").items() >= says.items()
    for content in ("[1, 2]", "null", "{", "[" * 10**5):
        (model / "generation_config.json").write_text(content)
        forget_models()
        code, _, line = cli("export", weights, tmp_path / "again", "--format=hf")
        assert (code, line.count("\n")) == (2, 1)
        assert line.endswith("generation_config.json: is no table of settings; mend it, or remove it\n")


def test_safetensors_of_a_tied_model_hold_its_head_once(folder: Path, weights: Path, tmp_path: Path, cli: Cli) -> None:
    assert cli("export", weights, tmp_path / "out", "--format=safetensors")[0] == 0
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert state.keys() == load_file(folder / "model.safetensors").keys()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert cli("export", weights, tmp_path / "out.pt", "--format=pt")[0] == 0
    every = torch.load(weights, weights_only=True)
    assert torch.load(tmp_path / "out.pt", weights_only=True).keys() == every.keys()  # torch loads them strictly


@pytest.mark.parametrize(
    ("names", "shape", "part"),
    [
        (["lm_head.weight"], (64, 8), "model.embed_tokens.weight and lm_head.weight differ, and config.json says that"),
        (["model.embed_tokens.weight"], (65, 8), "differ, and config.json says that they are one tensor"),
        (["model.norm.weight"], (9,), "model.norm.weight is [9], and config.json makes it [8]"),
        (["lm_head.weight", "model.embed_tokens.weight"], (65, 8), "is [65, 8], and config.json makes it [64, 8]"),
    ],
)
def test_weights_of_which_config_json_is_untrue_are_refused(
    weights: Path, tmp_path: Path, cli: Cli, names: list[str], shape: tuple[int, ...], part: str
) -> None:
    torch.save(torch.load(weights, weights_only=True) | dict.fromkeys(names, torch.ones(shape)), weights)
    status, _, error = cli("export", weights, tmp_path / "out", "--format=hf")
    assert status == 2
    assert part in error
    assert error.rstrip().splitlines()[-1].startswith("fsdp2.checkpoint: error: ")
    assert not (tmp_path / "out").exists()


def test_a_hugging_face_folder_is_not_called_unverified(folder: Path, tmp_path: Path, cli: Cli) -> None:
    assert cli("show", folder)[1].splitlines()[0] == f"{folder}: {FOREIGN}"
    line = cli("export", folder, tmp_path / "a.pt", "--format=pt")[1].splitlines()[0]
    assert line.endswith(f"bfloat16; the source is {FOREIGN}")
    older = tmp_path / "older"
    older.mkdir()
    (older / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save(load_file(folder / "model.safetensors"), older / "pytorch_model.bin")
    assert cli("show", older)[1].splitlines()[0] == f"{older}: {FOREIGN}"
    (older / "config.json").unlink()  # then it may be a run's own, which lost its marker
    assert "unverified" in cli("show", older)[1].splitlines()[0]


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": None, "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": 3}, None),
        ({}, None),
    ],
)
def test_a_dtype_is_found_where_older_and_composed_configurations_have_it(
    config: dict[str, Any], dtype: str | None
) -> None:
    assert dtype_of(json.dumps(config).encode()) == dtype

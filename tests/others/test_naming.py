"""`--model hf:`, `timm:` and `package.module:function`: what each names, and how what can't be used is refused."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import infer, models
from fsdp2.config import Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2.parallel.groups import shard_groups
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from fsdp2.train import main
from fsdp2_extra.models.blocks import find_blocks, named_blocks
from tests.harness import Ranks, forget_models, losses, main_in_ranks, of_kind
from tests.others import own
from tests.others.common import WORDS, flags, save


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    forget_models()


def refused(line: list[str]) -> str:
    """The one line of a refusal, before there is a process group or a run directory."""
    with pytest.raises(ConfigError) as caught:
        preflight(parse(line), World(0, 1, 0, 1))
    assert not dist.is_initialized()
    place = next(flag for flag in line if flag.startswith("--run-dir=")).removeprefix("--run-dir=")
    assert not Path(place).exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f"{empty}: has no config.json; give the folder that save_pretrained" in refused(flags(f"hf:{empty}", run))
    assert "is no folder; give one with a config.json" in refused(flags(f"hf:{tmp_path}/absent", run))
    assert "nobody/nothing: is not in the hub's cache, and can't be downloaded" in refused(
        flags("hf:nobody/nothing", run)
    )
    assert "give hf:DIR_OR_NAME, timm:NAME or MODULE:FUNCTION" in refused(flags("hf:", run))

    model = save("llama", tmp_path / "model")
    folder = tmp_path / "model"
    _change(folder, model_type="unheard_of")
    assert "transformers can't use" in refused(flags(model, run))
    (folder / "config.json").write_text("{")
    assert "transformers can't use" in refused(flags(model, run))


def test_a_folder_without_the_models_weights_is_refused(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "model"
    model = save("llama", folder)
    other = save("gpt2", tmp_path / "other")
    line = [*flags(model, run, *WORDS), "--strategy=none"]
    shutil.copy(tmp_path / "other" / "model.safetensors", folder / "model.safetensors")
    said = refused(line)
    assert "is of another model" in said or "tensors differ" in said
    (folder / "model.safetensors").unlink()
    said = refused(line)
    assert f"--model {model}" in said
    assert "--init-from scratch" in said
    assert f"--init-from {other.removeprefix('hf:')}: " in refused([*line, f"--init-from={other.removeprefix('hf:')}"])
    assert losses_of([*line, "--init-from=scratch"])


def losses_of(line: list[str]) -> list[float]:
    events: list[Any] = []
    main(parse([*line, "--max-steps=1", "--no-save-model"]), lambda kind, data: events.append((kind, data)))
    return losses(events)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
from pathlib import Path
Path({mark!r}).touch()
class OurConfig(LlamaConfig):
    model_type = "ours"
class OurModel(LlamaForCausalLM):
    config_class = OurConfig
"""


def test_code_that_comes_with_a_model_is_run_only_where_a_flag_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.hub.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder, mark = tmp_path / "model", tmp_path / "ran"
    model = save("llama", folder)
    (folder / "ours.py").write_text(CODE.format(mark=str(mark)))
    ours = {"AutoConfig": "ours.OurConfig", "AutoModelForCausalLM": "ours.OurModel"}
    _change(folder, model_type="ours", auto_map=ours, architectures=["OurModel"])
    line = [*flags(model, tmp_path / "run", *WORDS), "--strategy=none"]
    assert "--trust-remote-code" in refused(line)
    assert not mark.exists()
    assert losses_of([*line, "--trust-remote-code"])
    assert mark.exists()


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"num_hidden_layers": "two"}, "Field 'num_hidden_layers' expected int, got str"),
        ({"num_attention_heads": 3}, "is not a multiple of the number of attention heads"),
        ({"num_attention_heads": 0}, "modulo by zero"),
        ({"hidden_act": "nosuch"}, "KeyError('nosuch')"),
        ({"dtype": "nosuch"}, "has no attribute 'nosuch'"),
        ({"id2label": 5}, "has no attribute 'items'"),
        ({"pad_token_id": 10**9}, "Padding_idx must be within num_embeddings"),
        ({"num_hidden_layers": 0}, "has no list of blocks"),
        ({"num_hidden_layers": 3}, "tensors differ: model.layers.2."),
    ],
)
def test_a_configuration_that_makes_no_sense_is_one_line(tmp_path: Path, values: dict[str, Any], part: str) -> None:
    model = save("llama", tmp_path / "model")
    _change(tmp_path / "model", **values)
    said = refused(flags(model, tmp_path / "run", *WORDS))
    assert part in said
    assert said.startswith(f"--model {model}: ")


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_sequence_longer_than_a_table_of_positions_is_refused(tmp_path: Path, name: str) -> None:
    model, run = save(name, tmp_path / name), tmp_path / "run"
    assert losses_of([*flags(model, run, *WORDS), "--seq-len=32", "--strategy=none"])
    said = refused(flags(model, tmp_path / "long", *WORDS, "--seq-len=33"))
    assert said.startswith(f"--seq-len 33: is more than --model {model} has positions for (")


def test_positions_that_are_computed_have_no_end(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "llama", max_position_embeddings=16)
    assert losses_of([*flags(model, tmp_path / "run", *WORDS), "--seq-len=40", "--strategy=none"])


def _of_this_rank(run: str) -> str:
    """How a run ends whose function makes another model on each rank."""
    with pytest.raises(ConfigError) as caught:
        main(parse(flags("tests.others.own:of_this_rank", run)))
    return str(caught.value)


def test_ranks_that_make_different_models_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.run(_of_this_rank, str(tmp_path / "run"), ranks=3):
        assert said.startswith("--model: rank 1 made a model with other names")


def test_an_encoder_is_no_causal_model_unless_it_is_a_decoder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = save("bert", folder)
    _change(folder, architectures=["BertLMHeadModel"])
    assert "sees the tokens that it is to predict unless is_decoder is true" in refused(
        flags(model, tmp_path / "run", *WORDS)
    )
    _change(folder, architectures=["BertModel"])
    forget_models()
    assert models.get(model).task == "masked"


def test_a_model_whose_ranks_would_skip_other_layers_is_refused(tmp_path: Path) -> None:
    # OPT draws for each layer of each forward whether it is skipped, on each rank for itself.
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    place = tmp_path / "model"
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model("opt", vocab_size=256, word_embed_proj_dim=32, **sizes).save_pretrained(place)
    models.get(f"hf:{place}")
    _change(place, layerdrop=0.1)
    forget_models()
    line = refused(flags(f"hf:{place}", tmp_path / "run", *WORDS))
    assert "config.json: layerdrop is above 0: each rank would skip layers of its own" in line
    assert line.endswith("set it to 0")


def test_adapters_beside_a_model_are_refused(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "model")
    (tmp_path / "model" / "adapter_model.safetensors").touch()
    said = refused(flags(model, tmp_path / "run", *WORDS))
    assert "adapters aren't loaded; merge them into their model with peft, or move them away" in said


def test_a_file_that_each_run_would_keep_is_no_large_one(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "model")
    with open(tmp_path / "model" / "vocab.bin", "wb") as file:
        file.truncate(300 << 20)
    assert "vocab.bin: has more than 256 MiB" in refused(flags(model, tmp_path / "run", *WORDS))


def test_a_quantised_model_is_refused(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "model")
    _change(tmp_path / "model", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    line = refused(flags(model, tmp_path / "run", *WORDS))
    assert "its weights are quantised: packed integers and scales have no rows" in line


def test_a_model_of_fewer_classes_than_the_data_is_refused(tmp_path: Path) -> None:
    model = save("vit", tmp_path / "model", num_labels=2)
    assert "it tells 2 classes apart and digits has 10" in refused(flags(model, tmp_path / "run"))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("no_such_package:net", "no_such_package can't be imported"),
        ("tests.others.own:nothing", "tests.others.own has no nothing"),
        ("tests.others.own:constant", "constant is a int; give a function without arguments"),
        ("tests.others.own:number", "it returned a int; it has to return an nn.Module or a ModelSpec"),
        ("tests.others.own:fails", "it raised ValueError (not today)"),
        ("tests.others.own:flat", "Flat has no list of blocks"),
        ("tests.others.own:leaves", "it raised SystemExit (3)"),
        ("tests.others.own:grows", "it made a different model the second time"),
        ("tests.others.own:of_no_kind", "its ModelSpec is of kind 'audio', task 'causal'"),
        ("tests.others.own:without_token", "its ModelSpec has no special_token, which the task masked needs"),
        ("tests.others.own:without_sizes", "its ModelSpec has no sizes"),
        ("tests.others.own:of_other_numbers", "its make raised TypeError"),
        ("tests.others.own:half_a_table", "has no entry in the model's table of initial values"),
        ("tests.others.own:blocks_of_another", "its blocks are not all modules of the model"),
        ("tests.others.own:blocks_twice", "its blocks hold a module twice"),
        ("tests.others.own:without_method", "its ModelSpec has the method generate, and Words doesn't"),
        ("tests.others.own:scalar", "FSDP2 can't shard it: scale has no dimension to split"),
        ("tests.others.own:mixed_in_one_module", "extra is one of its own; put those of each dtype into a module"),
        ("timm:no_such_model", "no_such_model: timm has no such model"),
        ("timm:resnet5", "it has resnet50"),
        ("vit2", "vit"),
    ],
)
def test_what_names_no_model_is_refused(tmp_path: Path, name: str, part: str) -> None:
    assert part in refused(flags(name, tmp_path / "run"))


@pytest.mark.parametrize(("package", "name"), [("transformers", "hf:folder"), ("timm", "timm:resnet18")])
def test_a_library_that_is_absent_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, package: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package} isn't installed; .*pip install -e '\.\[{name[:2]}"):
        Config(model=name)


def test_modules_to_shard_can_be_named(ranks: Ranks, tmp_path: Path) -> None:
    name = "tests.others.own:flat"
    assert "no module has such a name" in refused(flags(name, tmp_path / "run", "--shard-modules=layers.*"))
    expected = losses(
        ranks.run(
            main_in_ranks,
            flags(
                name,
                tmp_path / "one",
                "--max-steps=2",
                "--strategy=none",
                "--grad-accumulation=2",
                "--shard-modules=t*",
            ),
            ranks=1,
        )[0]
    )
    events = ranks.run(main_in_ranks, flags(name, tmp_path / "two", "--max-steps=2", "--shard-modules=t*"))[0]
    assert losses(events) == expected
    (header,) = (line for line in of_kind(events, "start")[0]["header"] if line.startswith("sharding: "))
    assert "2 groups" in header
    assert header.endswith("; groups: one, two")


@pytest.mark.parametrize("name", ["sequential", "mixed", "words"])
def test_a_function_of_ones_own_trains_as_in_one_process(ranks: Ranks, tmp_path: Path, name: str) -> None:
    more = ("--max-steps=3", "--no-save-model", *(WORDS if name == "words" else ()))
    alone = flags(f"tests.others.own:{name}", tmp_path / "one", *more, "--strategy=none", "--grad-accumulation=2")
    expected = losses(ranks.run(main_in_ranks, alone, ranks=1)[0])
    assert losses(ranks.run(main_in_ranks, flags(f"tests.others.own:{name}", tmp_path / "two", *more))[0]) == expected
    assert len(set(expected)) == 3


def _accuracy(run: Path, model: str) -> float:
    return float(infer.main(run, model=model)["accuracy"])


def test_batch_norms_compute_in_fp32_where_the_rest_does_not(ranks: Ranks, tmp_path: Path) -> None:
    line = flags("tests.others.own:normed", tmp_path / "run", "--max-steps=20", "--mixed-precision", "--inspect")
    expected = ranks.run(main_in_ranks, line)[0]
    again = flags("tests.others.own:normed", tmp_path / "again", "--max-steps=20", "--mixed-precision")
    assert losses(ranks.run(main_in_ranks, [*again, "--activation-checkpointing"])[0]) == losses(expected)
    norms = flags("tests.others.own:normed", tmp_path / "norms", "--max-steps=20", "--mixed-precision")
    grouped = [*norms, "--shard-modules", "blocks.?.norm"]  # groups that are a batch norm and nothing else
    assert losses(ranks.run(main_in_ranks, grouped)[0]) == losses(expected)
    # Buffers and batch norms in fp32 and the rest in bf16: what a single process predicts is what the run measured.
    assert ranks.run(_accuracy, tmp_path / "run", "tests.others.own:normed", ranks=1) == [
        of_kind(expected, "eval")[-1]["accuracy"]
    ]


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t", "convnext_atto"])
def test_models_of_timm_are_found_their_blocks(name: str) -> None:
    spec = models.get(f"timm:{name}")
    model = spec.on_meta("own")
    blocks = spec.blocks(model)
    assert len(blocks) == {"vit_tiny_patch16_224": 12, "resnet10t": 2, "convnext_atto": 4}[name], blocks


def test_a_model_of_timm_trains_as_in_one_process(ranks: Ranks, tmp_path: Path) -> None:
    more = ("--max-steps=2", "--no-save-model", "--batch-size=2")
    alone = flags("timm:test_vit", tmp_path / "one", *more, "--strategy=none", "--grad-accumulation=2")
    expected = losses(ranks.run(main_in_ranks, alone, ranks=1)[0])
    assert losses(ranks.run(main_in_ranks, flags("timm:test_vit", tmp_path / "two", *more))[0]) == expected


def test_blocks_are_the_largest_list_and_those_beside_it(tmp_path: Path) -> None:
    def found(name: str) -> list[str]:
        model = models.get(save(name, tmp_path / name)).on_meta("own")
        names = {module: key for key, module in model.named_modules()}
        return [names[block] for block in find_blocks(model)]

    assert found("llama") == ["model.layers.0", "model.layers.1"]
    assert found("gpt2") == ["transformer.h.0", "transformer.h.1"]
    assert found("mixtral") == ["model.layers.0", "model.layers.1"]
    assert found("t5") == [f"{stack}.block.{n}" for stack in ("encoder", "decoder") for n in range(2)]


def test_lists_in_a_list_are_looked_into() -> None:
    """Nobody calls such a list, so nothing would be gathered for it."""
    model = own.Net()
    blocks = list(model.blocks)
    model.blocks = nn.ModuleList([nn.ModuleList([blocks[0]]), nn.ModuleDict({"one": blocks[1]})])
    assert find_blocks(model) == blocks


def _why_it_fails(line: list[str]) -> str:
    with pytest.raises(RuntimeError) as error:
        main_in_ranks(line)
    return str(error.value)


def test_blocks_that_are_not_called_are_said_to_be(ranks: Ranks, tmp_path: Path) -> None:
    line = flags("tests.others.own:direct", tmp_path / "run", "--max-steps=1")
    for said in ranks.run(_why_it_fails, line):
        assert "FSDP2 gathers a block when the block itself is called" in said
    whole = flags("tests.others.own:direct", tmp_path / "root", "--max-steps=1", "--shard-granularity=root")
    assert losses(ranks.run(main_in_ranks, whole)[0])


def test_named_blocks_refuse_what_is_nested() -> None:
    model = own.Net()
    assert named_blocks(model, ["blocks.?"]) == list(model.blocks)
    assert named_blocks(model, ["head", "stem"]) == [model.stem, model.head], "in the model's order"
    with pytest.raises(ValueError, match=r"matches blocks.0.linear and blocks.0, which contains it; name one of them"):
        named_blocks(model, ["blocks.0", "*.linear"])


def test_a_weight_that_two_modules_share_is_in_no_group_below_the_root() -> None:
    model = own.Words(64)
    assert [model.embedding] in shard_groups(model, list(model.layers), 1)
    model.head.weight = model.embedding.weight
    assert [[layer] for layer in model.layers] == shard_groups(model, list(model.layers), 1)


def test_a_run_reads_its_function_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_model.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(784, 10)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    spec = models.get("my_own_model:make")
    assert isinstance(spec.build("own"), nn.Linear)
    assert all(parameter.device == torch.device("meta") for parameter in spec.on_meta("own").parameters())


def test_the_pages_text_model_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "own-models.md").read_text()
    (source,) = re.findall(r"```python\n# mine\.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "words_of_mine.py").write_text(source)
    (tmp_path / "notes.txt").write_text("a text of my own\n" * 300)
    monkeypatch.syspath_prepend(str(tmp_path))
    line = ["--model=words_of_mine:words", f"--dataset=text:{tmp_path / 'notes.txt'}", "--documents=together"]
    events: list[Any] = []  # in this process: the ranks of other tests have been started
    run = [f"--run-dir={tmp_path / 'run'}", "--seq-len=32", "--lr=0.01", "--max-steps=8", "--device=cpu"]
    main(parse([*line, *run]), lambda kind, data: events.append((kind, data)))
    assert losses(events)[-1] < losses(events)[0]
    without = source.replace('{"vocab_size": 256', '{"words": 256').replace("vocab_size", "words")
    (tmp_path / "words_of_none.py").write_text(without)
    line = [line[0].replace("of_mine", "of_none"), *line[1:], f"--run-dir={tmp_path / 'none'}"]
    assert "the model's size has no vocab_size; name it in the sizes of its ModelSpec" in refused(line)

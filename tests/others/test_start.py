"""What a model of others starts from: its own initial values, or its files; the same on any number of ranks."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import models, train
from fsdp2.config import parse
from fsdp2.data import digits
from fsdp2.models.meta import parameters_on_meta
from fsdp2.options.errors import ConfigError
from fsdp2.report.compute import flops_per_sample
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from fsdp2_tools.checkpoint.__main__ import main as checkpoint
from tests.harness import Ranks, main_in_ranks, of_kind, same
from tests.others.common import SEED, WORDS, buffers_of, contents, flags, plain, save, started


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_the_weights_of_a_folder_are_there_on_any_number_of_ranks(ranks: Ranks, tmp_path: Path, name: str) -> None:
    model = save(name, tmp_path / "model")
    expected = contents(plain(model))
    assert expected["buffers"] or name != "llama", "no rotary table: the test shows less than it says"
    assert len(expected["shared"]) == (name == "t5")
    line = flags(model, tmp_path / "run", *WORDS)
    for count in (2, 3):
        for found in ranks.run(started, line, ranks=count):
            assert same(found, expected)


def test_packed_weights_of_another_folder_arrive_and_none_are_imported(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers makes one tensor of a layer's experts, each of which has its own in the folder."""
    model, other = save("mixtral", tmp_path / "model"), save("mixtral", tmp_path / "other", seed=1)
    place = other.removeprefix("hf:")
    for found in ranks.run(started, flags(model, tmp_path / "run", *WORDS, f"--init-from={place}"), ranks=2):
        assert same(found, contents(plain(other)))
    assert checkpoint(["import", place, str(tmp_path / "imported")]) == 2
    assert capsys.readouterr().err.endswith(f"so no run resumes from these; begin one with --init-from {place}\n")
    llama = save("llama", tmp_path / "llama").removeprefix("hf:")
    assert checkpoint(["import", llama, str(tmp_path / "imported")]) == 0


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float8_e4m3fn])
def test_quantized_weights_are_refused_and_not_cast_by_the_library(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """The tensors of mixtral's experts have other names in the folder; gpt2's older files have a mask of its own."""
    tensors = pytest.importorskip("safetensors.torch")
    model = save(name, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    line = flags(model, tmp_path / "run", *WORDS)
    weights = tensors.load_file(file)
    if name == "gpt2":
        weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.uint8)
        tensors.save_file(weights, file, {"format": "pt"})
        preflight(parse(line), World(0, 2, 0, 2)).hold.release(refused=True)
    changed = next(one for one in weights if re.search("experts.0.w1|q_proj|c_attn.weight", one))
    tensors.save_file({**weights, changed: weights[changed].to(dtype)}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=f"{re.escape(changed)} is of integers or 8 bits"):
        preflight(parse(line), World(0, 2, 0, 2))


def test_a_row_that_ends_like_padding_brings_no_advice_from_each_rank(tmp_path: Path) -> None:
    """GPT-2 is often given its end of a text as padding, and then warns of rows that are whole."""
    spec, heard = models.get(save("gpt2", tmp_path / "model", pad_token_id=2)), logging.Handler()
    said: list[str] = []
    vars(heard)["emit"] = lambda record: said.append(record.getMessage())
    library: Any = logging.getLogger("transformers")
    library.addHandler(heard)
    library.warning_once.__func__.cache_clear()  # so that it would say it again
    try:
        spec.build("own")(input_ids=torch.tensor([[5, 2]]))
    finally:
        library.removeHandler(heard)
    assert said == []


def test_the_operations_of_a_model_that_asks_for_values_are_counted(tmp_path: Path) -> None:
    """transformers asks, to make a mask, whether positions begin again; MFU on a GPU rests on the count."""
    spec, tokens = parse(flags(save("llama", tmp_path), tmp_path / "run", *WORDS)).spec, torch.arange(16)
    layers = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * 256
    attention = 2 * 2 * 2 * 16 * 16 * 32  # of two layers two products, which count without a mask
    for inputs in (tokens, {"input_ids": tokens, "position_ids": tokens}):
        assert flops_per_sample(spec, "own", (inputs, tokens)) == 3 * (2 * 16 * layers + attention)


def test_own_initial_values_are_those_of_the_seed_for_every_strategy(ranks: Ranks, tmp_path: Path) -> None:
    model = save("gpt2", tmp_path / "model")
    import transformers

    torch.manual_seed(SEED)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    expected = contents(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    line = flags(model, tmp_path / "run", *WORDS, "--init-from=scratch")
    for strategy, count in (("none", 1), ("fsdp2", 2), ("fsdp2", 3), ("ddp", 2), ("fsdp1", 2)):
        for found in ranks.run(started, [*line, f"--strategy={strategy}"], ranks=count):
            assert same(found["state"], expected["state"]), (strategy, count)
            assert same(found["buffers"], expected["buffers"]), (strategy, count)
    # One storage: what trains the embedding trains the head.
    assert expected["shared"] == [["transformer.wte.weight", "lm_head.weight"]] == found_shared(ranks, line)


def found_shared(ranks: Ranks, line: list[str]) -> Any:
    return ranks.run(started, line)[1]["shared"]


def test_buffers_that_no_state_dict_holds_are_the_same_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    line = flags("tests.others.own:net", tmp_path / "run")
    one, two = ranks.run(started, line)
    assert set(one["buffers"]) - set(one["state"]) == {"blocks.0.noise", "blocks.1.noise"}
    assert same(one, two)
    (alone,) = ranks.run(started, [*line, "--strategy=none"], ranks=1)
    assert same(alone, one)
    # And a plain process that loads what a run left has them too.
    built = parse(line).spec.build("own")
    assert all(
        torch.equal(one["buffers"][name], built.get_buffer(name)) for name in ("blocks.0.noise", "blocks.1.noise")
    )


def _trained(line: list[str]) -> dict[str, Any]:
    """The events of a run, and the buffers that each rank is left with."""
    engines: list[Any] = []
    make = train.make_engine

    def making(*arguments: Any, **named: Any) -> Any:
        engines.append(make(*arguments, **named))
        return engines[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "make_engine", making)
        events = main_in_ranks(line)
    return {"events": events, "buffers": buffers_of(engines[0].model)}


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp", "fsdp1"])
def test_running_statistics_are_one_models_when_it_is_evaluated_and_saved(
    ranks: Ranks, tmp_path: Path, strategy: str
) -> None:
    def line(run: str, *more: str) -> list[str]:
        return flags("tests.others.own:net", tmp_path / run, f"--strategy={strategy}", *more)

    one, two = ranks.run(_trained, line("whole", "--max-steps=5"))
    assert same(one["buffers"], two["buffers"])
    assert int(one["buffers"]["blocks.0.norm.num_batches_tracked"]) == 5
    ranks.run(_trained, line("cut", "--max-steps=3"))
    for rest in ranks.run(_trained, line("cut", "--max-steps=5")):
        assert same(rest["buffers"], one["buffers"])
        assert of_kind(rest["events"], "eval")[-1]["loss"] == of_kind(one["events"], "eval")[-1]["loss"]
    full = torch.load(tmp_path / "cut" / "full_model" / "full-model.pt", weights_only=True)
    assert torch.equal(full["blocks.0.norm.running_mean"], one["buffers"]["blocks.0.norm.running_mean"])


def test_a_buffer_that_is_made_of_a_parameter_is_an_error_and_never_garbage(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"1 of \d+ tensors were not initialised: copy"):
        ranks.run(started, flags("tests.others.own:forgets", tmp_path / "run"))


def test_only_parameters_are_on_meta() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            self.list = nn.ParameterList([torch.ones(2)])
            self.register_buffer("table", torch.arange(3.0), persistent=False)
            self.absent = nn.Linear(3, 3, bias=False)
            self.absent.register_parameter("bias", None)

    with parameters_on_meta():
        model = Tied()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.a.weight is model.b.weight
    assert not model.frozen.requires_grad
    assert torch.equal(model.table, torch.arange(3.0))  # type: ignore[arg-type]
    with_memory = nn.Linear(2, 2)
    assert not with_memory.weight.is_meta, "only inside"


def test_a_class_that_registers_in_its_own_way_is_called(tmp_path: Path) -> None:
    seen: list[str] = []

    class Counting(nn.Linear):
        def register_parameter(self, name: str, param: Tensor | None) -> None:
            seen.append(name)
            super().register_parameter(name, param)  # type: ignore[arg-type]

    with parameters_on_meta():
        model = Counting(2, 2)
    assert seen == ["weight", "bias"]
    assert model.weight.is_meta


def test_a_model_of_timms_in_its_published_form_gets_pictures_of_its_own_size(ranks: Ranks, tmp_path: Path) -> None:
    """timm's config.json has no model_type, and says the size in `pretrained_cfg` alone."""
    timm, transformers = pytest.importorskip("timm"), pytest.importorskip("transformers")
    from safetensors.torch import save_file

    torch.manual_seed(SEED)
    made = timm.create_model("test_vit", num_classes=10)
    save_file(made.state_dict(), tmp_path / "model.safetensors")
    settings = {"architecture": "test_vit", "num_classes": 10, "num_features": 64}
    settings["pretrained_cfg"] = {**timm.get_pretrained_cfg("test_vit").to_dict(), "num_classes": 10}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    library = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    line = flags(f"hf:{tmp_path}", tmp_path / "run", "--checkpoint-every=never", "--no-save-model", "--max-steps=1")
    spec, test = parse(line).spec, digits.load().test
    pictures, _ = test.__getitems__(range(8))
    large = nn.functional.interpolate(pictures.expand(-1, 3, -1, -1), (160, 160), mode="bilinear")
    found = spec.call(library, SimpleNamespace(inputs=pictures))
    assert torch.equal(found.logits, library(pixel_values=large).logits)
    events, _ = ranks.run(main_in_ranks, line)
    assert of_kind(events, "end")[0]["steps"] == 1
